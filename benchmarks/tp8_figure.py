"""The results of ``make bench-tp8`` as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import GROUP_WIDTH, groups, sheet
from benchmarks.tables import MIB
from benchmarks.tp8_tables import stage_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw step times, host stages, pools and padding into one file."""
    model = results["model"]
    title = f"TP {results['tp']}, {model['layers']} layers, hidden {model['hidden']}, bfloat16"
    with sheet(path, results, title) as (_, (steps, stages, pools, padding)):
        _draw_steps(steps, results)
        _draw_stages(stages, results)
        _draw_pools(pools, results)
        _draw_padding(padding, results)


def _draw_steps(axes: Axes, results: dict[str, Any]) -> None:
    for mode, places, rows, width in groups(axes, results["modes"]):
        p50 = [row["step_ms_p50"] for row in rows]
        axes.bar(places, p50, width, label=mode)
        for place, row in zip(places, rows, strict=True):
            rounds = row["rounds_step_ms_p50"]
            axes.plot([place] * len(rounds), rounds, "k.", markersize=3)
            axes.annotate(
                f"{row['step_ms_p99']:.0f}",
                (place, max(*rounds, row["step_ms_p50"])),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize="x-small",
                color="gray",
            )
    axes.set_title("Step time: median (bar), of each round (dots); p99 (number)", loc="left")
    axes.set_ylabel("ms")
    axes.legend(fontsize="small")
    axes.grid(axis="y", alpha=0.3)


def _draw_stages(axes: Axes, results: dict[str, Any]) -> None:
    bars = [
        (mode, name, row["stages_us"])
        for name in next(iter(results["modes"].values()))["workloads"]
        for mode, found in results["modes"].items()
        for row in [found["workloads"][name]]
    ]
    labels = [f"{name}  {mode}" for mode, name, _ in bars]
    left = [0.0] * len(bars)
    for stage in stage_names(results):
        widths = [row.get(stage, 0.0) / 1e3 for _, _, row in bars]
        axes.barh(labels, widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title("Host time of a step by stage; sample waits for the device", loc="left")
    axes.set_xlabel("ms")
    axes.margins(x=0.35)  # room for the legend
    axes.legend(fontsize="small", loc="center right")
    axes.grid(axis="x", alpha=0.3)


def _draw_pools(axes: Axes, results: dict[str, Any]) -> None:
    modes = [mode for mode, found in results["modes"].items() if found["buckets"]]
    pools = [results["modes"][mode]["pool"] for mode in modes]
    series = {
        "one pool, of the deployment": [pool["deployment"] for pool in pools],
        "a pool for each bucket, sum": [pool["separate"] for pool in pools],
        "tensors of the largest bucket": [pool["needed_by_largest"] for pool in pools],
        "tensors of all buckets, sum": [pool["needed"] for pool in pools],
    }
    width = GROUP_WIDTH / len(series)
    for index, (label, values) in enumerate(series.items()):
        places = [i + (index - 1.5) * width for i in range(len(modes))]
        bars = axes.bar(places, [value / MIB for value in values], width, label=label)
        axes.bar_label(bars, fmt="%.2g", fontsize="small")
    axes.set_xticks(range(len(modes)), modes)
    axes.set_title("Graph memory of one rank; pools grow by 2 MiB", loc="left")
    axes.set_ylabel("MiB")
    axes.margins(y=0.25)
    axes.legend(fontsize="small", ncols=2)


def _draw_padding(axes: Axes, results: dict[str, Any]) -> None:
    for mode, places, rows, width in groups(axes, results["modes"]):
        bars = axes.bar(places, [100 * row["padded_fraction"] for row in rows], width, label=mode)
        axes.bar_label(bars, fmt="%.0f", fontsize="small")
    axes.set_title("Padding: share of the tokens that graphs replayed", loc="left")
    axes.set_ylabel("%")
    axes.margins(y=0.2)
    axes.legend(fontsize="small")
