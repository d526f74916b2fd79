"""The batch of one step, collected row by row, or carried on from the step before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.step import IntArray, RankBatch, RowStart, pack_ints

NO_INTS = b""


class BatchDraft:
    """Collects what the ranks of one data-parallel rank run in a step.

    ``requests``, ``lengths`` (tokens that each runs) and ``samples`` are in batch order.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.lengths: list[int] = []
        self.samples: list[bool] = []
        self.num_tokens = 0
        self.started: list[RowStart] = []
        self._records: list[int] = []
        self._appended: list[int] = []
        self._blocks: list[int] = []

    def schedule(self, request: Request, length: int) -> None:
        """Add the next ``length`` tokens of a request that has a row and enough blocks."""
        computed = request.num_computed_tokens
        end = computed + length
        is_last = end == len(request.tokens)
        # Workers know what the row started with and what they computed since.
        for token_id in request.tokens[max(computed, request.num_started_tokens) :]:
            self._appended += (request.row, token_id)
        self._records += (request.row, computed, length, is_last)
        self.samples.append(is_last)
        self.requests.append(request)
        self.lengths.append(length)
        self.num_tokens += length

    def add_block(self, request: Request, block_id: int) -> None:
        """Extend a row's block table by one, at its end."""
        self._blocks += (request.row, len(request.block_ids), block_id)
        request.block_ids.append(block_id)

    @property
    def is_decode(self) -> bool:
        """Whether every request runs one token and samples."""
        return self.num_tokens == len(self.requests) and all(self.samples)

    @property
    def query_len(self) -> int:
        """Uniform query length, 0 where lengths differ or a single token samples nothing."""
        length = self.lengths[0]
        if length == 1:
            return int(self.is_decode)
        return length if all(other == length for other in self.lengths) else 0

    def build(self) -> RankBatch:
        return RankBatch(
            scheduled=pack_ints(self._records),
            appended=pack_ints(self._appended),
            blocks=pack_ints(self._blocks),
            started=tuple(self.started),
        )

    def to_decode_batch(self) -> DecodeBatch:
        records = np.array(self._records, dtype="<i4").reshape(-1, 4)
        return DecodeBatch(self, records)


class DecodeBatch:
    """A decode batch that goes on unchanged: its arrays persist, a step only advances them."""

    def __init__(self, draft: BatchDraft, records: IntArray) -> None:
        self.draft = draft
        self.num_reqs = num_reqs = len(draft.requests)
        self._records = records  # [num_reqs, 4]
        self._computed = records[:, 1]
        self._appended = np.empty((num_reqs, 2), dtype="<i4")
        self._appended[:, 0] = records[:, 0]
        self._tokens = self._appended[:, 1]

    def advance(self, token_ids: bytes, blocks: Sequence[int]) -> RankBatch:
        """Return the next step's batch.

        Args:
            token_ids: int32 [num_reqs], sampled in the last step.
            blocks: flat records (row, index, block id) of rows that crossed a block's end.
        """
        self._computed += 1
        self._tokens[:] = np.frombuffer(token_ids, dtype="<i4")
        return RankBatch(
            self._records.tobytes(),
            self._appended.tobytes(),
            pack_ints(list(blocks)) if blocks else NO_INTS,
        )
