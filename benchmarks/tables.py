"""Parts of tables that benches of several deployments share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

MIB = 1 << 20


def make_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table, with words in the first column and numbers in the others."""
    table = Table(title=title)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def filled_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """Return a table for a terminal."""
    table = make_table(title, *columns)
    for line in lines:
        table.add_row(*line)
    return table


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Return the lines of a table for a document."""
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(['---'] + ['---:'] * (len(columns) - 1))} |"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def rows(deployments: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return each deployment with each workload and its figures."""
    for name, found in deployments.items():
        for workload, row in found["workloads"].items():
            yield name, workload, row


def or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
