"""The results of ``make bench-overlap`` as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import GROUP_WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
NUM_COLUMNS = 3
# What a step's time was, from the bottom of a bar to its top, and its colour.
PARTS = (
    ("busy", ("busy",), "#4878a8"),
    ("waits for the host", ("idle_host",), "#c44e52"),
    ("for updates", ("idle_update", "idle_external"), "#dd8452"),
    ("for other ranks", ("idle_collective",), "#8172b3"),
    ("for copies and events", ("idle_copy", "idle_event"), "#937860"),
)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw a chart for each model in each mode."""
    from matplotlib.figure import Figure

    rows: Rows = results["rows"]
    found = list(dict.fromkeys((row["model"], row["mode"]) for row in rows))
    num_lines = -(-len(found) // NUM_COLUMNS)
    figure = Figure(figsize=(13, 3.4 * num_lines + 1), layout="constrained")
    charts = figure.subplots(num_lines, NUM_COLUMNS, squeeze=False).flat
    for (model, mode), axes in zip(found, charts, strict=False):
        _draw_steps(axes, [row for row in rows if (row["model"], row["mode"]) == (model, mode)])
        axes.set_title(f"{model}, {mode}", loc="left", fontsize="small")
    for axes in charts:
        axes.set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(
        "A decode step of the device: one step in flight (left bars) and two (right)\n"
        f"{results['note']}"
    )
    figure.savefig(path, dpi=110)


def _draw_steps(axes: Axes, rows: Rows) -> None:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    width = GROUP_WIDTH / 2
    for row in rows:
        place = batches.index(row["batch"]) + (row["in_flight"] - 1.5) * width
        bottom = 0.0
        for label, causes, colour in PARTS:
            height = sum(row[f"{cause}_us"] for cause in causes) / 1e3
            is_first = row is rows[0]
            axes.bar(
                place, height, width * 0.9, bottom, color=colour,
                label=label if is_first else None,
            )  # fmt: skip
            bottom += height
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("ms")
    axes.grid(axis="y", alpha=0.3)
