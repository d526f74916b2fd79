"""The results of ``make bench-tp8`` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from benchmarks.tables import MIB, make_table, or_dash, rows
from dist_aclgraph.device.step_measures import WORKER_STAGES

SIZES = ("deployment", "separate", "needed_by_largest", "needed")  # of a pool's record


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return steps, host stages, and what the graphs took."""
    yield _steps(results)
    yield _stages(results)
    yield _graphs(results)


def _steps(results: dict[str, Any]) -> Table:
    base = results["base"]
    table = make_table(
        f"Steps, TP {results['tp']}, {results['operators']} operators each, on {results['cores']} "
        f"cores. {results['note']}",
        "mode", "workload", "step ms p50", "p99", f"against {base}", "tokens/s",
        "launch us/operator", "update us/layer", "device waits us", "padding", "tokens differ",
    )  # fmt: skip
    for mode, name, row in rows(results["modes"]):
        table.add_row(
            mode,
            name,
            f"{row['step_ms_p50']:.1f}",
            f"{row['step_ms_p99']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_s']:.0f}",
            f"{row['launch_us_per_operator']:.1f}",
            or_dash(row["update_us_per_layer"]),
            or_dash(row["update_wait_us"]),
            f"{row['padded_fraction']:.0%}",
            f"{row['differing_requests']}/{row['requests']}",
        )
    return table


def _stages(results: dict[str, Any]) -> Table:
    names = stage_names(results)
    title = "Host time of a step by stage, rank 0 and engine (us; median of the rounds' means)"
    table = make_table(title, "mode", "workload", *names)
    for mode, name, row in rows(results["modes"]):
        table.add_row(mode, name, *(or_dash(row["stages_us"].get(stage)) for stage in names))
    return table


def _graphs(results: dict[str, Any]) -> Table:
    table = make_table(
        "Graphs: capture, and bytes of a rank's pool (MiB)",
        "mode", "ready s", "capture s", "by bucket, ms", "one pool", "separate pools",
        "tensors: largest", "tensors: sum",
    )  # fmt: skip
    for mode, found in results["modes"].items():
        pool = found["pool"]
        table.add_row(
            mode,
            f"{found['start_s']:.0f}",
            f"{found['capture_s']:.2f}",
            " ".join(f"{b['bucket']}:{b['capture_seconds'] * 1e3:.0f}" for b in found["buckets"]),
            f"{pool['deployment'] / MIB:.0f}",
            f"{pool['separate'] / MIB:.0f}",
            f"{pool.get('needed_by_largest', 0) / MIB:.2f}",
            f"{pool['needed'] / MIB:.2f}",
        )
    return table


def markdown(results: dict[str, Any]) -> str:
    """Return steps and graphs as tables for a document."""
    ranks = f"TP {results['tp']} on {results['cores']} cores"
    base = f"against {results['base']}"
    lines = [
        f"{ranks}, {results['repeats']} rounds of {results['steps']} tokens a request, "
        f"{results['operators']} operators a step; {results['note']}.",
        "",
        f"| mode | workload | ms a step | p99 | {base} | tokens/s | launch, us an operator "
        "| update, us a layer | padding |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for mode, name, row in rows(results["modes"]):
        lines.append(
            f"| {mode} | {name} | {row['step_ms_p50']:.1f} | {row['step_ms_p99']:.0f} "
            f"| {row['speedup']:.2f} | {row['tokens_per_s']:.0f} "
            f"| {row['launch_us_per_operator']:.0f} | {or_dash(row['update_us_per_layer'])} "
            f"| {row['padded_fraction']:.0%} |"
        )
    lines += [
        "",
        "| mode | capture, s | one pool, MiB | separate pools | tensors: largest bucket | sum |",
        "| --- |" + " ---: |" * 5,
    ]
    for mode, found in results["modes"].items():
        if found["buckets"]:
            pool = {key: size / MIB for key, size in found["pool"].items() if key in SIZES}
            lines.append(
                f"| {mode} | {found['capture_s']:.2f} | {pool['deployment']:.0f} "
                f"| {pool['separate']:.0f} | {pool['needed_by_largest']:.2f} "
                f"| {pool['needed']:.2f} |"
            )
    return "\n".join([*lines, ""])


def stage_names(results: dict[str, Any]) -> list[str]:
    """Return the stages that any mode has, in the order of a step."""
    order = ("schedule", "message", *WORKER_STAGES, "result")
    found = {stage for _, _, row in rows(results["modes"]) for stage in row["stages_us"]}
    return [*(stage for stage in order if stage in found), *sorted(found - set(order))]
