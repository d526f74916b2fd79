"""The results of ``make bench-overlap`` as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.tables import filled_table, markdown_table

# What the device did in a step, by the emulator's counters.
CAUSES = (
    "busy", "idle_host", "idle_update", "idle_external", "idle_event", "idle_copy",
    "idle_collective",
)  # fmt: skip
COLUMNS = (
    "model, mode, batch", "in flight", "ms a step", "busy, ms", "waits, us", "of the step",
    "allowed, us", "host", "updates", "events", "copies", "other ranks",
)  # fmt: skip


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return all steps."""
    yield filled_table(f"Decode steps. {results['note']}", COLUMNS, _lines(results["rows"]))


def markdown(results: dict[str, Any]) -> str:
    """Return the same for a document."""
    lines = [
        f"{results['steps']} tokens a request on {results['cores']} cores, load of the machine "
        f"{results['load'][0]:.1f} before and {results['load'][1]:.1f} behind; {results['note']}.",
        "",
        *markdown_table(COLUMNS, _lines(results["rows"])),
        "",
    ]
    return "\n".join(lines)


def _lines(rows: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        whole_us = row["busy_us"] + row["waits_us"]
        yield (
            f"{row['model']}, {row['mode']}, {row['batch']}",
            str(row["in_flight"]),
            f"{row['step_us'] / 1e3:.2f}",
            f"{row['busy_us'] / 1e3:.2f}",
            f"{row['waits_us']:.0f}",
            f"{row['waits_us'] / whole_us:.1%}",
            f"{row['allowed_us']:.0f}",
            f"{row['idle_host_us']:.0f}",
            f"{row['idle_update_us'] + row['idle_external_us']:.0f}",
            f"{row['idle_event_us']:.0f}",
            f"{row['idle_copy_us']:.0f}",
            f"{row['idle_collective_us']:.0f}",
        )
