"""The results of ``make bench-tp8`` as tables and as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import Report, draw_bars, make_table, sheet
from benchmarks.common.turns import workload_rows
from dist_aclgraph.device.step_measures import WORKER_STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRAPHS = {
    "mode": "{name}",
    "ready, s": "{start_s:.0f}",
    "capture, s": "{capture_s:.2f}",
    "by bucket, ms": "{by_bucket}",
    "one pool, MiB": "{deployment!M:.0f}",
    "separate pools": "{separate!M:.0f}",
    "tensors: largest bucket": "{needed_by_largest!M:.2f}",
    "sum": "{needed!M:.2f}",
}
POOLS = {
    "one pool, of the deployment": "deployment",
    "a pool for each bucket, sum": "separate",
    "tensors of the largest bucket": "needed_by_largest",
    "tensors of all buckets, sum": "needed",
}


def report(results: dict[str, Any]) -> Report:
    steps = {
        "mode": "{name}",
        "workload": "{workload}",
        "ms a step": "{step_ms_p50:.1f}",
        "p99": "{step_ms_p99:.1f}",
        f"against {results['base']}": "{speedup:.2f}",
        "tokens/s": "{tokens_per_s:.0f}",
        "launch, us an operator": "{launch_us_per_operator:.1f}",
        "update, us a layer": "{update_us_per_layer:.0f}",
        "device waits, us": "{update_wait_us:.0f}",
        "padding": "{padded_fraction:.0%}",
        "tokens differ": "{differing_requests}/{requests}",
    }
    rows = list(workload_rows(results["modes"]))
    stages = {name: f"{{stages_us[{name}]:.0f}}" for name in stage_names(results)}
    all_stages = [{**row, "stages_us": dict.fromkeys(stages) | row["stages_us"]} for row in rows]
    return Report(
        f"TP {results['tp']}, {results['repeats']} rounds of {results['steps']} tokens a request, "
        f"{results['operators']} operators a step",
        [
            make_table("Steps", steps, rows),
            make_table(
                "Host time of a step by stage, rank 0 and engine (us; median of the rounds' means)",
                {"mode": "{name}", "workload": "{workload}", **stages},
                all_stages,
            ),
            make_table(
                "Graphs of one rank: capture, and its pool", GRAPHS, _graphs(results["modes"])
            ),
        ],
    )


def draw(results: dict[str, Any], path: Path) -> None:
    model, modes = results["model"], results["modes"]
    rows = list(workload_rows(modes))
    title = (
        f"TP {results['tp']}, {model['layers']} layers, hidden {model['hidden']}, bfloat16, "
        f"{results['repeats']} rounds of {results['steps']} tokens"
    )
    pools = [
        {"mode": row["name"], "what": what, "mib": row[key] / (1 << 20)}
        for row in _graphs(modes)
        if row["buckets"]
        for what, key in POOLS.items()
    ]
    with sheet(path, results, title) as (_, (steps, stages, memory, padding)):
        draw_bars(
            steps, rows, "Step time: median (bar), of each round (dots); p99 (number)",
            group="{title}", series="{name}", height="step_ms_p50", unit="ms",
            dots="rounds_step_ms_p50", label="{step_ms_p99:.0f}",
        )  # fmt: skip
        _draw_stages(stages, results)
        draw_bars(
            memory, pools, "Graph memory of one rank; pools grow by 2 MiB", group="{mode}",
            series="{what}", height="mib", unit="MiB",
            label="{mib:.2g}",
        )  # fmt: skip
        draw_bars(
            padding, rows, "Padding: share of the tokens that graphs replayed", group="{title}",
            series="{name}", height="padded_fraction",
            label="{padded_fraction:.0%}",
        )  # fmt: skip


def _draw_stages(axes: Axes, results: dict[str, Any]) -> None:
    names = list(next(iter(results["modes"].values()))["workloads"])
    rows = sorted(workload_rows(results["modes"]), key=lambda row: names.index(row["workload"]))
    labels = [f"{row['workload']}  {row['name']}" for row in rows]
    left = [0.0] * len(rows)
    for stage in stage_names(results):
        widths = [row["stages_us"].get(stage, 0.0) / 1e3 for row in rows]
        axes.barh(labels, widths, left=left, label=stage)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title("Host time of a step by stage; sample waits for the device", loc="left")
    axes.set_xlabel("ms")
    axes.margins(x=0.35)  # space for the legend
    axes.legend(fontsize="small", loc="center right")
    axes.grid(axis="x", alpha=0.3)


def stage_names(results: dict[str, Any]) -> list[str]:
    """Return the stages that occur in at least one mode, in their order in a step."""
    order = ("schedule", "message", *WORKER_STAGES, "result")
    found = {stage for row in workload_rows(results["modes"]) for stage in row["stages_us"]}
    return [*(stage for stage in order if stage in found), *sorted(found - set(order))]


def _graphs(modes: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "needed_by_largest": 0,
            **found,
            **found["pool"],
            "name": mode,
            "by_bucket": " ".join(
                f"{bucket['bucket']}:{bucket['capture_seconds'] * 1e3:.0f}"
                for bucket in found["buckets"]
            ),
        }
        for mode, found in modes.items()
    ]
