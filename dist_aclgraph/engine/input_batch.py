"""The running batch as a worker keeps it: rows brought up to date by a step's differences.

Host memory only. Every rank of a tensor parallel group holds the same rows, because every rank
receives the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dist_aclgraph.scheduler.step import IntArray, RankBatch, RowSampling, unpack_ints


@dataclass(frozen=True)
class StepInputs:
    """What one step runs, in batch order.

    Attributes:
        rows: [num_reqs], row of each request.
        token_ids, positions, slots: [num_tokens].
        query_ends, kv_lens: [num_reqs], cumulative query lengths and KV lengths.
        block_table: [num_reqs, num_blocks], as wide as the longest request needs.
        sampled: [num_sampled], indices into the batch of the requests that get a token.
        last_tokens: [num_sampled], indices into the tokens of what those are sampled from.
    """

    rows: IntArray
    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_ends: IntArray
    kv_lens: IntArray
    block_table: IntArray
    sampled: npt.NDArray[np.intp]
    last_tokens: IntArray


class InputBatch:
    """Owns tokens, block tables and sampling parameters of all rows."""

    def __init__(self, max_rows: int, max_len: int, block_size: int) -> None:
        self._block_size = block_size
        max_blocks = -(-max_len // block_size)
        # One token more than the context: the last one sampled is never computed.
        self.token_ids: IntArray = np.zeros((max_rows, max_len + 1), dtype=np.int32)
        self.num_tokens: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.block_table: IntArray = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.sampling: list[RowSampling] = [RowSampling()] * max_rows
        self.is_plain = np.ones(max_rows, dtype=bool)

    def apply(self, batch: RankBatch) -> None:
        """Bring the rows up to date."""
        for start in batch.started:
            row = start.row
            tokens, blocks = unpack_ints(start.token_ids), unpack_ints(start.block_ids)
            self.token_ids[row, : len(tokens)] = tokens
            self.num_tokens[row] = len(tokens)
            self.block_table[row, : len(blocks)] = blocks
            self.sampling[row] = start.sampling
            self.is_plain[row] = is_plain(start.sampling)
        if batch.blocks:
            rows, indices, ids = unpack_ints(batch.blocks, 3).T
            self.block_table[rows, indices] = ids
        if batch.appended:
            rows, tokens = unpack_ints(batch.appended, 2).T
            # A row may get several tokens in one step: number them within their row.
            if len(rows) > 1 and len(np.unique(rows)) < len(rows):
                for row, token in zip(rows, tokens, strict=True):
                    self.token_ids[row, self.num_tokens[row]] = token
                    self.num_tokens[row] += 1
            else:
                self.token_ids[rows, self.num_tokens[rows]] = tokens
                self.num_tokens[rows] += 1

    def step_inputs(self, batch: RankBatch) -> StepInputs:
        """Gather what the scheduled requests run in this step."""
        rows, computed, scheduled, sample = unpack_ints(batch.scheduled, 4).T
        kv_lens = computed + scheduled
        query_ends = np.cumsum(scheduled, dtype=np.int32)
        if int(query_ends[-1]) == len(rows):  # one token each: decoding
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, scheduled)
            starts = np.repeat(computed - (query_ends - scheduled), scheduled)
            positions = np.arange(query_ends[-1], dtype=np.int32) + starts
        size = self._block_size
        slots = self.block_table[token_rows, positions // size] * size + positions % size
        width = (int(kv_lens.max()) + size - 1) // size
        sampled = np.flatnonzero(sample)
        return StepInputs(
            rows=rows,
            token_ids=self.token_ids[token_rows, positions],
            positions=positions,
            slots=slots,
            query_ends=query_ends,
            kv_lens=kv_lens,
            block_table=self.block_table[rows, :width],
            sampled=sampled,
            last_tokens=query_ends[sampled] - 1,
        )


def is_plain(sampling: RowSampling) -> bool:
    """Say whether a row wants the most probable token and nothing else."""
    return (
        sampling.temperature == 0.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and sampling.repetition_penalty == 1.0
        and sampling.logprobs < 0
        and not sampling.suppressed
    )
