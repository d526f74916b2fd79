"""A worker without a model: it mirrors rows from step messages and keeps tokens as its KV cache."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dist_aclgraph.kv.block_pool import DUMMY_BLOCK
from dist_aclgraph.scheduler.step import (
    RankBatch,
    RowSampling,
    StepPlan,
    StepResult,
    pack_ints,
    unpack_ints,
)


def next_token(tokens: Sequence[int], vocabulary: int) -> int:
    """Return the token that the fake model generates after ``tokens``, all of them counted."""
    return zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes()) % vocabulary


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    sampling: RowSampling
    sampled: list[int] = field(default_factory=list)


class FakeWorker:
    """Runs steps; asserts that each finds in the cache exactly what it needs."""

    def __init__(self, num_blocks: int, block_size: int, vocabulary: int = 50) -> None:
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.cache = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.rows: dict[int, Row] = {}
        self.last_plan: StepPlan | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        self.last_plan = plan
        (batch,) = plan.batches
        self._update_rows(batch)
        records = unpack_ints(batch.scheduled, 4)
        assert len({int(row) for row in records[:, 0]}) == len(records), "a row runs twice"
        for row_index, computed, length, _ in records.tolist():
            self._write(self.rows[row_index], computed, length)
        sampled = []
        for row_index, computed, length, sample in records.tolist():
            row = self.rows[row_index]
            self._check_cache(row, computed + length)
            if sample:
                assert computed + length == len(row.tokens), "samples before the last token"
                sampled.append(next_token(row.tokens, self.vocabulary))
        return StepResult(plan.epoch, plan.step, 0, pack_ints(sampled))

    def lose_cache(self) -> None:
        self.cache.fill(-1)
        self.rows.clear()

    def _update_rows(self, batch: RankBatch) -> None:
        for start in batch.started:
            tokens = unpack_ints(start.token_ids).tolist()
            self.rows[start.row] = Row(
                tokens, unpack_ints(start.block_ids).tolist(), start.sampling
            )
        for row, token_id in unpack_ints(batch.appended, 2).tolist():
            self.rows[row].tokens.append(token_id)
        for row, index, block_id in unpack_ints(batch.blocks, 3).tolist():
            assert index == len(self.rows[row].blocks), "a block table has a hole"
            self.rows[row].blocks.append(block_id)

    def _write(self, row: Row, computed: int, length: int) -> None:
        for position in range(computed, computed + length):
            block_id = row.blocks[position // self.block_size]
            assert block_id != DUMMY_BLOCK
            # KV depends on the whole prefix, not on the token alone.
            value = zlib.crc32(np.asarray(row.tokens[: position + 1], dtype="<i4").tobytes())
            self.cache[block_id, position % self.block_size] = value

    def _check_cache(self, row: Row, end: int) -> None:
        prefix = 0
        for position in range(end):
            token = np.asarray(row.tokens[position : position + 1], dtype="<i4").tobytes()
            prefix = zlib.crc32(token, prefix)
            block_id = row.blocks[position // self.block_size]
            assert self.cache[block_id, position % self.block_size] == prefix, (
                f"position {position} holds the KV of another prefix"
            )
