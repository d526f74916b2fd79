from __future__ import annotations

import io

from rich.console import Console

from dist_aclgraph.actors.controller import Progress
from dist_aclgraph.cli.progress import StartProgress


def shown(*reports: Progress, is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120, color_system=None)
    with StartProgress(console) as show:
        for report in reports:
            show(report)
            if show._bar is not None:
                show._bar.refresh()
    return out.getvalue()


def test_a_state_does_not_show_the_numbers_of_the_one_before():
    loading = Progress("LOADING", 28, 28, "layers")

    text = shown(loading, Progress("NEGOTIATING"), Progress("CAPTURING"), is_terminal=True)

    assert "28/28" in text
    assert "/28" not in text[text.index("Negotiating") :]


def test_without_a_terminal_each_state_is_one_line():
    text = shown(
        Progress("LOADING", 1, 2, "layers"), Progress("LOADING", 2, 2, "layers"),
        Progress("CAPTURING"), is_terminal=False,
    )  # fmt: skip

    assert text == "Loading weights ...\nCapturing graphs ...\n"
