"""The results of ``make bench-overlap`` as a table and as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import GROUP_WIDTH, Report, make_table, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
STEPS = {
    "model, mode, batch": "{model}, {mode}, {batch}",
    "in flight": "{in_flight}",
    "ms a step": "{step_ms:.2f}",
    "busy, ms": "{busy_ms:.2f}",
    "waits, us": "{waits_us:.0f}",
    "of the step": "{share:.1%}",
    "allowed, us": "{allowed_us:.0f}",
    "host": "{idle_host_us:.0f}",
    "updates": "{updates_us:.0f}",
    "events": "{idle_event_us:.0f}",
    "copies": "{idle_copy_us:.0f}",
    "other ranks": "{idle_collective_us:.0f}",
}
NUM_COLUMNS = 3
# The parts of the device's time with their colours, in the order from the bottom of a bar to its
# top.
PARTS = (
    ("busy", ("busy",), "#4878a8"),
    ("waits for the host", ("idle_host",), "#c44e52"),
    ("for updates", ("idle_update", "idle_external"), "#dd8452"),
    ("for other ranks", ("idle_collective",), "#8172b3"),
    ("for copies and events", ("idle_copy", "idle_event"), "#937860"),
)


def report(results: dict[str, Any]) -> Report:
    rows = [
        {
            **row,
            "step_ms": row["step_us"] / 1e3,
            "busy_ms": row["busy_us"] / 1e3,
            "share": row["waits_us"] / (row["busy_us"] + row["waits_us"]),
            "updates_us": row["idle_update_us"] + row["idle_external_us"],
        }
        for row in results["rows"]
    ]
    return Report(f"{results['steps']} tokens a request", [make_table("Decode steps", STEPS, rows)])


def draw(results: dict[str, Any], path: Path) -> None:
    rows: Rows = results["rows"]
    found = list(dict.fromkeys((row["model"], row["mode"]) for row in rows))
    num_lines = -(-len(found) // NUM_COLUMNS)
    title = "A decode step of the device: one step in flight (left bars) and two (right)"
    shape, size = (num_lines, NUM_COLUMNS), (13, 3.4 * num_lines + 1)
    with sheet(path, results, title, shape, size) as (figure, charts):
        for (model, mode), axes in zip(found, charts, strict=False):
            _draw_steps(axes, [row for row in rows if (row["model"], row["mode"]) == (model, mode)])
            axes.set_title(f"{model}, {mode}", loc="left", fontsize="small")
        for axes in charts[len(found) :]:
            axes.set_visible(False)
        entries = charts[0].get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower center", ncols=5)


def _draw_steps(axes: Axes, rows: Rows) -> None:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    width = GROUP_WIDTH / 2
    places = [batches.index(row["batch"]) + (row["in_flight"] - 1.5) * width for row in rows]
    bottoms = [0.0] * len(rows)
    for label, causes, colour in PARTS:
        heights = [sum(row[f"{cause}_us"] for cause in causes) / 1e3 for row in rows]
        axes.bar(places, heights, width * 0.9, bottoms, color=colour, label=label)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylabel("ms")
    axes.grid(axis="y", alpha=0.3)
