"""The results of ``make bench-serve`` as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import GROUP_WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw CPU time of a token, and how long it is on its way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    cpu, latency = figure.subplots(1, 2)
    _draw(cpu, results, "cpu_us", "rounds_cpu_us")
    cpu.axhline(results["goals"]["cpu_us"], color="gray", linestyle=":", label="aim")
    cpu.set_title("CPU time of a token: median (bar), of each round (dots)", loc="left")
    cpu.set_ylabel("us")
    cpu.legend(fontsize="small")
    _draw(latency, results, "latency_ms_p50", None)
    latency.axhline(results["goals"]["latency_ms"], color="gray", linestyle=":")
    latency.set_title("From a step's result to the client's frame: median", loc="left")
    latency.set_ylabel("ms")
    figure.suptitle(
        f"{results['steps']} steps, {results['interval_ms']:g} ms apart, on {results['cores']} CPU "
        f"cores with a load of {results['load'][0]:.1f} to {results['load'][1]:.1f}\n"
        f"{results['note']}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, results: dict[str, Any], key: str, rounds: str | None) -> None:
    rows = results["rows"]
    names = list(dict.fromkeys(row["server"] for row in rows))
    sizes = list(dict.fromkeys(row["streams"] for row in rows))
    width = GROUP_WIDTH / len(names)
    for index, name in enumerate(names):
        found = [row for row in rows if row["server"] == name]
        places = [i + (index - (len(names) - 1) / 2) * width for i in range(len(sizes))]
        bars = axes.bar(places, [row[key] for row in found], width * 0.95, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize="small", padding=6)
        for place, row in zip(places, found, strict=True):
            if rounds is not None:
                axes.plot([place] * len(row[rounds]), row[rounds], "k.", markersize=3)
    axes.set_xticks(range(len(sizes)), [f"{size} streams" for size in sizes])
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
