"""The results of ``make bench-serve`` as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.tables import filled_table, markdown_table

COLUMNS = (
    "server", "streams", "CPU us a token", "of the floor", "result to frame, ms p50", "p99",
)  # fmt: skip


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return what a token costs."""
    yield filled_table(f"A token from the engine to the socket. {_goals(results)}", COLUMNS,
                       _lines(results))  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """Return the same for a document."""
    lines = [
        f"{results['steps']} steps, {results['interval_ms']:g} ms apart, medians of "
        f"{results['repeats']} rounds on {results['cores']} cores, load of the machine "
        f"{results['load'][0]:.1f} before and {results['load'][1]:.1f} behind; "
        f"{'servers on one core, all else on the other; ' * results['is_apart']}"
        f"{results['note']}. "
        f"{_goals(results)}",
        "",
        *markdown_table(COLUMNS, _lines(results)),
        "",
    ]
    return "\n".join(lines)


def _goals(results: dict[str, Any]) -> str:
    goals = results["goals"]
    return f"Aim: {goals['cpu_us']:g} us and {goals['latency_ms']:g} ms."


def _lines(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    floors = {
        row["streams"]: row["cpu_us"]
        for row in results["rows"]
        if row["server"] == results["floor"]
    }
    for row in results["rows"]:
        yield (
            row["server"],
            str(row["streams"]),
            f"{row['cpu_us']:.1f}",
            f"{row['cpu_us'] / floors[row['streams']]:.2f}",
            f"{row['latency_ms_p50']:.2f}",
            f"{row['latency_ms_p99']:.2f}",
        )
