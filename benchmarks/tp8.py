"""``make bench-tp8``: compares graph modes for one model on eight ranks, in the same run.

All modes are deployed at the same time and measured alternately, so that a drift of the machine's
speed affects all modes equally. There are four workloads: batches of three sizes that only decode,
and a batch during which more requests arrive. The ranks share this machine's cores, so the results
are no measurements of an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.command import report_bench, run_command
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.one_rank import OneRank
from benchmarks.common.turns import (
    MIXED,
    ray_for,
    show_start,
    summary,
    take_turns,
)
from benchmarks.common.workload import (
    BESIDE,
    Arrival,
    Run,
    decode_workload,
    median_stages,
    mixed_workload,
    paired_ratio,
    percentile,
    step_ms,
)
from benchmarks.reports.tp8_report import draw, report
from dist_aclgraph.planning.buckets import asked_sizes

BATCHES = (1, 8, 32)
MIXED_BATCH = 8
PROMPT_LEN = 16
WARM_UP_STEPS = 12
VOCAB = 2048
MAX_LEN = 256
# The largest size is large enough for all prompts of a workload, so no prompt is split into chunks.
# The sizes of chunks would depend on the timing, and chunks change the rounding of attention.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MODES = "NONE,PIECEWISE,FULL"
# The stages in which the host queues a step's work. In one further stage, the host sends a step's
# lengths while it waits for the previous step. This stage is left out.
LAUNCHING = ("forward", "replay", "update")


def main(
    tp: Annotated[int, typer.Option(help="Ranks of each deployment.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    steps: Annotated[int, typer.Option(help="Tokens per request.")] = 40,
    repeats: Annotated[int, typer.Option(help="Rounds: all modes by turns.")] = 3,
    modes: Annotated[str, typer.Option(help="Graph modes; the first is the base.")] = MODES,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    report_bench(
        "tp8",
        out,
        lambda folder, bar: measure(folder, bar, tp, layers, steps, repeats, modes.split(",")),
        report,
        draw,
    )


def measure(
    folder: Path,
    bar: Progress,
    tp: int,
    layers: int,
    steps: int,
    repeats: int,
    modes: Sequence[str],
) -> dict[str, Any]:
    """Deploy all modes, run all workloads alternately, and return the measurements."""
    shape = Shape(hidden=256, layers=layers, heads=8, kv_heads=8, ffn=512, vocab=VOCAB)
    path = write_checkpoint(shape, folder / shape.name, torch.bfloat16)
    warm_up, workloads = _workloads(min(steps, WARM_UP_STEPS)), _workloads(steps)
    engines = {mode: _make_engine(path, mode, tp, bar) for mode in modes}
    with ray_for(engines.values()):
        turns = take_turns(engines, warm_up, workloads, repeats, bar)
    reports = turns.reports
    bar.console.print("Counting operators and bytes of one rank ...")
    rank = OneRank(engines[modes[0]].config)
    operators = rank.count_launches(engines[modes[0]].config, MIXED_BATCH).count
    base = modes[0]
    return {
        **turns.circumstances,
        "tp": tp,
        "model": asdict(shape),
        "steps": steps,
        "repeats": repeats,
        "operators": operators,
        "base": base,
        "modes": {
            mode: {
                "start_s": reports[mode]["ready_seconds"],
                **_capture(reports[mode], rank, engines[mode]),
                "workloads": {
                    name: _summary(found, turns.runs[base][name], operators, layers)
                    for name, found in turns.runs[mode].items()
                },
            }
            for mode in modes
        },
    }


def _make_engine(path: Path, mode: str, tp: int, bar: Progress) -> DecodeEngine:
    return DecodeEngine(
        path,
        max(BATCHES),
        on_progress=show_start(bar, mode),
        parallel={"tp": tp},
        graph={
            "mode": mode,
            **asked_sizes(mode, [b for b in BUCKETS if b <= max(BATCHES)], BUCKETS),
            "lazy": "off",
            "rebucket_s": 0.0,
        },
        scheduler={"max_num_batched_tokens": BUCKETS[-1]},
        max_model_len=MAX_LEN,
        kv={"num_blocks": 4 * max(BATCHES)},
    )


def _workloads(steps: int) -> dict[str, list[Arrival]]:
    decode = {str(batch): decode_workload(batch, PROMPT_LEN, steps, VOCAB) for batch in BATCHES}
    return {**decode, MIXED: mixed_workload(MIXED_BATCH, PROMPT_LEN, steps, VOCAB)}


def _capture(report: dict[str, Any], rank: OneRank, engine: DecodeEngine) -> dict[str, Any]:
    """Return the cost of a mode's graphs: the seconds of the slowest rank, and the bytes of one
    rank.
    """
    buckets = report["buckets"]
    keys = ("graph", "bucket", "capture_seconds", "streams", "replays", "padded_tokens")
    found: dict[str, Any] = {
        "buckets": [{key: bucket[key] for key in keys} for bucket in buckets],
        "capture_s": sum(bucket["capture_seconds"] for bucket in buckets),
        "pool": {"deployment": report["pool_bytes"], "shared": 0, "separate": 0, "needed": 0},
    }
    if buckets:
        sizes = rank.pool_sizes(engine.config)
        found["pool"] |= {
            "shared": sizes.shared,
            "separate": sum(sizes.alone.values()),
            "needed": sum(sizes.needs.values()),
            "needed_by_largest": max(sizes.needs.values()),
            "alone": sizes.alone,
            "needs": sizes.needs,
        }
    return found


def _summary(
    runs: Sequence[Run], base: Sequence[Run], operators: int, layers: int
) -> dict[str, Any]:
    """Return the results of one mode with one workload. The times between tokens of all rounds are
    counted together.
    """
    gaps = [gap for run in runs for gap in run.gaps_ms]
    rounds = step_ms(runs)
    stages = median_stages([run.stages_us for run in runs])
    launching = sum(stages.get(stage, 0.0) for stage in LAUNCHING)
    updates = "update" in stages
    return {
        **summary(runs, base),
        "step_ms_p99": percentile(gaps, 99),
        "rounds_step_ms_p50": rounds,
        "speedup": paired_ratio(step_ms(base), rounds),
        "stages_us": {k: v for k, v in stages.items() if k not in BESIDE},
        "overlapped_us": {k: v for k, v in stages.items() if k in BESIDE},
        "launch_us_per_operator": launching / operators,
        "update_us_per_layer": stages.get("update_per_layer", stages["update"] / layers)
        if updates
        else None,
        "update_wait_us": stages.get("update_wait") if updates else None,
    }


if __name__ == "__main__":
    run_command(main)
