"""Plants slowdowns in a decode step, one after the other, and prints what ``benchmarks.perf_gate``
finds. This program is a separate process, because it needs an emulator with modelled time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import perf_gate
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.graphs.step_buffers import StepBuffers
from dist_aclgraph.graphs.task_update import UpdatableTask
from dist_aclgraph.layers.norm import RmsNorm
from dist_aclgraph.planning.dispatcher import GraphDispatcher

Plant = Any  # context manager; the step is slower within this context


def before_launch(act: Callable[[Any], Any]) -> Plant:
    launch = ModelRunner.launch

    def slower(self: ModelRunner, *args: Any) -> None:
        act(self._npu)
        launch(self, *args)

    return patch.object(ModelRunner, "launch", slower)


def norm_in_two_launches() -> Plant:
    after_sum = RmsNorm.after_sum

    def slower(self: RmsNorm, x: Any, residual: Any) -> Any:
        normed, total = after_sum(self, x, residual)
        return normed * 1, total

    return patch.object(RmsNorm, "after_sum", slower)


def each_update_twice() -> Plant:
    update = UpdatableTask._update

    def slower(self: UpdatableTask, stream: Any) -> None:
        update(self, stream)
        update(self, stream)

    return patch.object(UpdatableTask, "_update", slower)


SLOWDOWNS: dict[str, tuple[str, Callable[[], Plant]]] = {
    "a launch more a layer": ("dense", norm_in_two_launches),
    "a launch more a layer, of a hybrid": ("hybrid", norm_in_two_launches),
    "a synchronize": ("dense", lambda: before_launch(lambda npu: npu.synchronize())),
    "an upload": ("sparse", lambda: before_launch(lambda npu: npu.upload(np.zeros(4, np.int32)))),
    "a download": (
        "dense",
        lambda: before_launch(lambda npu: torch.ones(2, device=npu.device).cpu()),
    ),
    "a launch outside of the graph": (
        "latent",
        lambda: before_launch(lambda npu: torch.ones(2, device=npu.device)),
    ),
    "an update twice": ("dense", each_update_twice),
    "logits of twice the vocabulary": (
        "dense",
        lambda: patch.dict(perf_gate.EQUAL, {"vocab_size": 2 * perf_gate.EQUAL["vocab_size"]}),
    ),
    "a table that is sent although it is the same": (
        "experts",
        lambda: patch.object(StepBuffers, "_update_block_table", lambda *args: slice(None)),
    ),
    "steps without graphs": (
        "dense",
        lambda: patch.object(GraphDispatcher, "dispatch", lambda *args, **more: (None, "")),
    ),
}


def main() -> None:
    known = json.loads(perf_gate.NUMBERS.read_text())
    for name, (case, plant) in SLOWDOWNS.items():
        with tempfile.TemporaryDirectory() as folder, plant():
            found = {case: perf_gate.count_case(Path(folder), perf_gate.CASES[case])}
        worse = perf_gate.growths(known, found)
        print(f"{name}: {'; '.join(worse) or 'not found'}", flush=True)


if __name__ == "__main__":
    main()
