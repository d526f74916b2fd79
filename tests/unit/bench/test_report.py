from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import Report, draw_bars, make_table, sheet

RESULTS: dict[str, Any] = {"cores": 2, "load": [0.5, 1.5], "note": "not an NPU figure"}
ROWS = [
    {"way": "a", "size": 1 << 20, "ratio": {"median": 1.5, "rounds": [1.0, 2.0]}, "us": None},
    {"way": "b", "size": 1 << 19, "ratio": {"median": 1.0, "rounds": [1.0]}, "us": 7},
]
COLUMNS = {"way": "{way}", "MiB": "{size!M:.1f}", "ratio": "{ratio[median]:.2f}", "us": "{us:.0f}"}


def test_cells_are_scaled_and_a_missing_value_is_a_dash() -> None:
    table = make_table("Ways", COLUMNS, ROWS)

    assert list(table.lines) == [["a", "1.0", "1.50", "-"], ["b", "0.5", "1.00", "7"]]


def test_terminal_and_document_have_the_same_columns() -> None:
    table = make_table("Ways", COLUMNS, ROWS)

    assert [column.header for column in table.for_terminal().columns] == list(COLUMNS)
    assert list(table.for_document())[:3] == [
        "| way | MiB | ratio | us |",
        "| --- | ---: | ---: | ---: |",
        "| a | 1.0 | 1.50 | - |",
    ]


def test_a_document_says_what_was_measured_and_on_what() -> None:
    told = Report("3 rounds", [make_table("Ways", COLUMNS, ROWS)], "Aim: 1 us.")

    assert told.for_document(RESULTS).splitlines()[0] == (
        "3 rounds on 2 cores, load of the machine 0.5 before and 1.5 after; not an NPU figure. "
        "Aim: 1 us."
    )


def test_bars_of_one_group_lie_side_by_side(tmp_path: Path) -> None:
    with sheet(tmp_path / "x.png", RESULTS, "Ways", (1, 1)) as (_, (axes,)):
        draw_bars(
            axes, ROWS, "Ratio", group="all", series="{way}", height="ratio[median]",
            dots="ratio[rounds]", label="{us}",
        )  # fmt: skip
        first, second = axes.patches

    assert [first.get_height(), second.get_height()] == [1.5, 1.0]
    assert first.get_x() + first.get_width() <= second.get_x()
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
