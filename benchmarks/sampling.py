"""The cost of sampling: steps with random, filtered or penalised sampling are compared with greedy
steps.

All ways of sampling are measured alternately in one run of the whole engine. The ratios are from
the emulator; they are not measurements of an NPU.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.checkpoints import Shape, write_checkpoint
from benchmarks.common.engine import DecodeEngine
from benchmarks.common.report import Table, make_table

BATCHES = (1, 32)
PROMPT_LEN = 128
SHAPE = Shape(hidden=512, layers=4, heads=8, kv_heads=2, ffn=1024)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}
RANDOM_GOAL = 1.15  # the aim for the time of a random step, divided by the time of a greedy step
COLUMNS = {
    "batch": "{batch}",
    "sampling": "{way}",
    "step ms": "{step_ms:.2f}",
    "of greedy": "{ratio:.2f}",
}


def sampling_cost(folder: Path, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Decode alternately with each way of sampling. Return one record per batch size and way."""
    path = write_checkpoint(SHAPE, folder / f"{SHAPE.name}-sampling", torch.float32)
    device = {"emulator": {"strict": False}}
    rows = []
    with DecodeEngine(path, max(BATCHES), dtype="float32", device=device) as engine:
        for batch in BATCHES:
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for repeat in range(repeats + 1):
                for way, sampling in WAYS.items():
                    run = engine.decode(batch, PROMPT_LEN, steps if repeat else 8, **sampling)
                    if repeat:  # the first run only warms up, and is not counted
                        times[way].append(run.step_ms)
            greedy_ms = statistics.median(times["greedy"])
            for way, measured in times.items():
                step_ms = statistics.median(measured)
                rows.append(
                    {"batch": batch, "way": way, "step_ms": step_ms, "ratio": step_ms / greedy_ms}
                )
    return rows


def sampling_table(rows: list[dict[str, Any]]) -> Table:
    title = f"Steps by sampling, 4 layers, float32 (goal of random: {RANDOM_GOAL})"
    return make_table(title, COLUMNS, rows)
