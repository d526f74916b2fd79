"""The results of ``make bench-messages`` as tables, and as one figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.figures import GROUP_WIDTH
from benchmarks.tables import filled_table, markdown_table

COLUMNS = ("way", "workers", "plan, bytes", "p10, us", "p50, us", "p90, us", "CPU us a step")


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return what a step's messages take."""
    yield filled_table(
        f"From a plan to the last result. {_goal(results)}", COLUMNS, _lines(results)
    )


def markdown(results: dict[str, Any]) -> str:
    """Return the same for a document."""
    lines = [
        f"{results['repeats']} rounds of {results['steps']} steps on {results['cores']} cores, "
        f"load of the machine {results['load'][0]:.1f} before and {results['load'][1]:.1f} behind; "
        f"{results['note']}. {_goal(results)}",
        "",
        *markdown_table(COLUMNS, _lines(results)),
        "",
    ]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw medians, with the tenth of a hundred beneath: what a quiet machine comes near to."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    counts = list(dict.fromkeys(row["workers"] for row in rows))
    figure = Figure(figsize=(5.5 * len(sizes), 4.4), layout="constrained")
    width = GROUP_WIDTH / len(ways)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False).flat, sizes, strict=True):
        for index, way in enumerate(ways):
            found = [row for row in rows if (row["way"], row["bytes"]) == (way, size)]
            places = [i + (index - (len(ways) - 1) / 2) * width for i in range(len(counts))]
            bars = axes.bar(places, [row["p50_us"] for row in found], width * 0.95, label=way)
            axes.bar_label(bars, fmt="%.0f", fontsize="small")
            axes.plot(places, [row["p10_us"] for row in found], "k_", markersize=12)
        axes.axhline(results["goal"]["ms"] * 1e3, color="gray", linestyle=":")
        axes.set_xticks(range(len(counts)), [f"{count} workers" for count in counts])
        axes.set_title(f"plans of {size} bytes", loc="left")
        axes.set_ylabel("us")
        axes.legend(fontsize="small")
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"From a plan to the last result: median (bar), p10 (line); load "
        f"{results['load'][0]:.1f} to {results['load'][1]:.1f}; {results['note']}"
    )
    figure.savefig(path, dpi=110)


def _goal(results: dict[str, Any]) -> str:
    goal = results["goal"]
    return f"Aim: {goal['ms']:g} ms with {goal['workers']} workers."


def _lines(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in results["rows"]:
        yield (
            row["way"],
            str(row["workers"]),
            str(row["bytes"]),
            *(f"{row[f'p{share}_us']:.0f}" for share in (10, 50, 90)),
            f"{row['cpu_us']:.0f}",
        )
