from __future__ import annotations

import io

from rich.console import Console

from dist_aclgraph.actors.controller.controller import BYTES, Progress
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
    loading = Progress("LOADING", 28, 28, "things")

    text = shown(loading, Progress("NEGOTIATING"), Progress("CAPTURING"), is_terminal=True)

    assert "28/28" in text
    assert "/28" not in text[text.index("Negotiating") :]


def test_without_a_terminal_each_state_is_one_line():
    text = shown(
        Progress("LOADING", 1, 2, BYTES), Progress("LOADING", 2, 2, BYTES),
        Progress("CAPTURING"), is_terminal=False,
    )  # fmt: skip

    assert text == "Loading weights ...\nCapturing graphs ...\n"


def test_weights_are_counted_in_bytes():
    text = shown(Progress("LOADING", 3 << 29, 4 << 30, BYTES), is_terminal=True)

    assert "1.50/4.00 GiB" in text


def test_steps_before_the_start_of_workers_are_shown() -> None:
    text = shown(
        Progress("BUILDING", 1, 9), Progress("STARTING_RAY"), Progress("STARTING_CONTROLLER"),
        is_terminal=False,
    )  # fmt: skip

    assert text.splitlines() == [
        "Building the emulated NPU, once for this machine ...",
        "Starting Ray ...",
        "Starting the controller ...",
    ]


def test_each_group_of_a_change_is_shown_by_itself():
    text = shown(
        Progress("PLACING", part="group 1 of 2"), Progress("DRAINING", part="group 1 of 2"),
        Progress("SERVING"),
        Progress("PLACING", part="group 2 of 2"), Progress("DRAINING", part="group 2 of 2"),
        is_terminal=False,
    )  # fmt: skip

    assert text.splitlines() == [
        "Placing workers (group 1 of 2) ...",
        "Draining: requests that run end (group 1 of 2) ...",
        "Placing workers (group 2 of 2) ...",
        "Draining: requests that run end (group 2 of 2) ...",
    ]
