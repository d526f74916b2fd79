"""The results of ``make bench-moe`` as tables for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.tables import MIB, filled_table, markdown_table, rows

STEPS = (
    "variant", "workload", "ms a step", "step / base", "tokens/s", "rate / base", "tokens a step",
    "accepted", "load, max / mean", "reruns", "tokens differ",
)  # fmt: skip
GRAPHS = ("variant", "ready, s", "graphs", "capture, s", "streams", "pool, MiB")


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return steps, and what the graphs took."""
    yield filled_table(f"Experts, {_circumstances(results)}", STEPS, _steps(results))
    yield filled_table("Graphs of one rank", GRAPHS, _graphs(results))


def markdown(results: dict[str, Any]) -> str:
    """Return the same for a document."""
    return "\n".join(
        [
            f"{_circumstances(results)}.",
            "",
            *markdown_table(STEPS, _steps(results)),
            "",
            *markdown_table(GRAPHS, _graphs(results)),
            "",
        ]
    )


def _circumstances(results: dict[str, Any]) -> str:
    layout = ", ".join(f"{axis.upper()} {size}" for axis, size in results["layout"].items())
    return (
        f"{layout} on {results['cores']} cores, {results['repeats']} rounds of {results['steps']} "
        f"tokens a request; {results['note']}"
    )


def _steps(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, workload, row in rows(results["variants"]):
        yield (
            name,
            workload,
            f"{row['step_ms_p50']:.1f}",
            f"{row['step_ratio']['median']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['rate_ratio']['median']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            " ".join(f"{share:.0%}" for share in row["acceptance"]) or "-",
            f"{row['imbalance']:.2f}",
            str(row["reruns"]),
            f"{row['differing_requests']}/{row['requests']}",
        )


def _graphs(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in results["variants"].items():
        yield (
            name,
            f"{found['start_s']:.0f}",
            str(found["graphs"]),
            f"{found['capture_s']:.2f}",
            str(found["streams"]),
            f"{found['pool_bytes'] / MIB:.0f}",
        )
