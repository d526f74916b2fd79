"""A model runner of one rank in this process, and steps for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.dense import DenseDecoder
from dist_aclgraph.models.spec import read_model_spec
from dist_aclgraph.scheduler.step import (
    RankBatch,
    RowSampling,
    RowStart,
    StepPlan,
    pack_ints,
    unpack_ints,
)

MAX_LEN = 128
GREEDY = RowSampling()


def make_runner(npu: Npu, directory: Path, max_tokens: int = 8) -> ModelRunner:
    config = make_config(
        {
            "model": str(directory),
            "dtype": "float32",
            "scheduler": {"max_num_seqs": max_tokens},
            "kv": {"block_size": 32},
        }
    )
    model = DenseDecoder(
        read_model_spec(directory),
        CommGroup((0,), 0),
        Checkpoint(directory, torch.float32),
        device=npu.device,
        max_len=MAX_LEN,
    )
    return ModelRunner(
        config,
        npu,
        model,
        num_blocks=64,
        max_len=MAX_LEN,
        max_decode_tokens=max_tokens,
        owns_output=True,
    )


class Sequences:
    """Requests that all run in every step, decided by hand instead of by a scheduler."""

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[list[int]], sampling: Any = None
    ) -> None:
        self._runner = runner
        self._step = 0
        self.tokens = [list(prompt) for prompt in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self._sampling = sampling or [GREEDY] * len(prompts)

    def prefill(self) -> None:
        started, records = [], []
        for row, prompt in enumerate(self.tokens):
            blocks = list(range(1 + 4 * row, 5 + 4 * row))
            start = RowStart(row, pack_ints(prompt), pack_ints(blocks), self._sampling[row])
            started.append(start)
            records += [row, 0, len(prompt), 1]
        self._run("NONE", records, started=tuple(started))

    def decode(self, mode: str, bucket: int, live: int | None = None) -> None:
        """Run one step of the first ``live`` requests."""
        rows = range(live or len(self.tokens))
        appended = [x for row in rows for x in (row, self.tokens[row][-1])]
        records = [x for row in rows for x in (row, len(self.tokens[row]) - 1, 1, 1)]
        self._run(mode, records, bucket, appended=pack_ints(appended))

    def _run(self, mode: Any, records: list[int], num_tokens: int = 0, **batch: Any) -> None:
        self._step += 1
        query_len = 1 if num_tokens else 0
        rank_batch = RankBatch(pack_ints(records), **batch)
        plan = StepPlan(1, self._step, 1, mode, num_tokens, query_len, (rank_batch,))
        result = self._runner.execute(plan, 0, 0)
        self._runner.prepare_next(lambda: False)
        for row, token in zip(records[::4], unpack_ints(result.token_ids), strict=True):
            self.tokens[row].append(int(token))
            self.new[row].append(int(token))
