"""The results of ``make bench-moe`` as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import groups, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw steps, tokens, drafts and loads into one file."""
    layout = ", ".join(f"{axis.upper()} {size}" for axis, size in results["layout"].items())
    with sheet(path, results, f"{results['model']}, {layout}") as (figure, charts):
        steps, speed, drafts, loads = charts
        _draw_ratios(steps, results, "step_ratio", "Time of a step against the base's")
        _draw_ratios(speed, results, "rate_ratio", "Tokens/s against the base's")
        _draw_drafts(drafts, results)
        _draw_loads(loads, results)
        handles, labels = steps.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small"
        )


def _draw_ratios(axes: Axes, results: dict[str, Any], key: str, title: str) -> None:
    for name, places, rows, width in groups(axes, results["variants"]):
        axes.bar(places, [row[key]["median"] for row in rows], width, label=name)
        for place, row in zip(places, rows, strict=True):
            rounds = row[key]["rounds"]
            axes.plot([place] * len(rounds), rounds, "k.", markersize=3)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_title(f"{title}: median (bar), of each round (dots)", loc="left")
    axes.grid(axis="y", alpha=0.3)


def _draw_drafts(axes: Axes, results: dict[str, Any]) -> None:
    for name, places, rows, width in groups(axes, results["variants"]):
        bars = axes.bar(places, [row["tokens_per_step"] for row in rows], width, label=name)
        shares = ["\n".join(f"{100 * share:.0f}" for share in row["acceptance"]) for row in rows]
        axes.bar_label(bars, shares, fontsize="x-small")
    axes.set_title("Tokens of a request and step; drafts accepted by position (%)", loc="left")
    axes.margins(y=0.2)
    axes.grid(axis="y", alpha=0.3)


def _draw_loads(axes: Axes, results: dict[str, Any]) -> None:
    for name, places, rows, width in groups(axes, results["variants"]):
        axes.bar(places, [row["imbalance"] for row in rows], width, label=name)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_title("Load of the experts: the busiest rank's against the mean", loc="left")
    axes.grid(axis="y", alpha=0.3)
