"""The running batch as a worker keeps it: rows brought up to date by a step's differences.

Host memory only. Every rank of a tensor parallel group holds the same rows, because every rank
receives the same plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.engine.sampling_table import SamplingTable
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.steps.draft_places import draft_places
from dist_aclgraph.steps.host_step import NO_INTS, NO_RECORDS, NO_STEP, HostStep
from dist_aclgraph.steps.prompt_share import share_prompts
from dist_aclgraph.steps.step import RankBatch


class InputBatch:
    """Owns tokens, block tables and sampling parameters of all rows."""

    def __init__(
        self, max_rows: int, max_len: int, place: ContextPlace, num_drafts: int = 0
    ) -> None:
        """Make room.

        Args:
            place: of the rank among those that share its requests' context.
        """
        self._place = place
        self._num_drafts = num_drafts
        block_size = place.shards.tokens_per_block
        # One token more than the context: the last one sampled is never computed.
        self.token_ids: IntArray = np.zeros((max_rows, max_len + 1), dtype=np.int32)
        self.num_tokens: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.block_table: IntArray = np.zeros(
            (max_rows, table_width(max_len, block_size, num_drafts)), dtype=np.int32
        )
        self.sampling = SamplingTable(max_rows)
        self._idle = NO_STEP
        if num_drafts:
            empty = (NO_RECORDS, num_drafts, self.block_table, place, self.sampling.may_draft)
            self._idle = replace(NO_STEP, drafts=draft_places(*empty))

    def apply(self, batch: RankBatch) -> None:
        """Bring the rows up to date."""
        for start in batch.started:
            row = start.row
            tokens, blocks = unpack_ints(start.token_ids), unpack_ints(start.block_ids)
            self.token_ids[row, : len(tokens)] = tokens
            self.num_tokens[row] = len(tokens)
            self.block_table[row, : len(blocks)] = blocks
            self.block_table[row, len(blocks) :] = 0  # drafts may look beyond: no block of others
            self.sampling.set(row, start.sampling)
        if batch.blocks:
            rows, indices, ids = unpack_ints(batch.blocks, 3).T
            self.block_table[rows, indices] = ids
        if batch.appended:
            self._append(*unpack_ints(batch.appended, 2).T)

    def _append(self, rows: IntArray, tokens: IntArray) -> None:
        """Add tokens; those of one row stand together."""
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        counts = np.diff(starts, append=len(rows)).astype(np.int32)
        index = np.arange(len(rows), dtype=np.int32) - np.repeat(starts, counts)
        self.token_ids[rows, self.num_tokens[rows] + index] = tokens
        self.num_tokens[rows[starts]] += counts

    def step_inputs(self, batch: RankBatch) -> HostStep:
        """Gather what the scheduled requests run in this step: this rank's share of it."""
        if not batch.scheduled:
            return self._idle
        records = unpack_ints(batch.scheduled, 4)
        rows, computed, scheduled, num_logits = records.T
        kv_lens = computed + scheduled
        query_ends = np.cumsum(scheduled, dtype=np.int32)
        if int(query_ends[-1]) == len(rows):  # one token each: decoding
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, scheduled)
            starts = np.repeat(computed - (query_ends - scheduled), scheduled)
            positions = np.arange(query_ends[-1], dtype=np.int32) + starts
        place, k = self._place, self._num_drafts
        slots = place.shards.slots_of(place.shard, self.block_table, token_rows, positions)
        sampled = np.flatnonzero(num_logits)
        if k == 0:
            token_ids = self.token_ids[token_rows, positions]
            places, next_tokens, drafts = query_ends[sampled] - 1, NO_INTS, None
        else:
            token_ids, next_tokens = self._tokens_and_next(token_rows, positions)
            drafts = draft_places(records, k, self.block_table, place, self.sampling.may_draft)
            places = drafts.places.ravel()
        width = table_width(int(kv_lens.max()), place.shards.tokens_per_block, k)
        step = HostStep(
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_ends=query_ends,
            kv_lens=kv_lens,
            block_table=self.block_table[rows, :width],
            sampled=sampled,
            num_logits=num_logits[sampled],
            places=places,
            next_tokens=next_tokens,
            drafts=drafts,
        )
        return share_prompts(step, place.num_prompt_ranks, place.prompt_rank)

    def _tokens_and_next(self, rows: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the tokens at positions, drafts by reference, and those after them, 0 where the
        host knows none.
        """
        ahead = positions - self.num_tokens[rows]  # 0 is the first draft
        last = self.token_ids.shape[1] - 1
        token_ids = self.token_ids[rows, np.minimum(positions, last)]
        references = -1 - (rows * self._num_drafts + ahead)
        after = self.token_ids[rows, np.minimum(positions + 1, last)]
        return (
            np.where(ahead < 0, token_ids, references).astype(np.int32),
            np.where(ahead < -1, after, 0).astype(np.int32),
        )


def table_width(num_tokens: int, block_size: int, num_drafts: int) -> int:
    """Return the width of the block table: blocks for the tokens and for positions of drafts.

    A step verifies k drafts behind the last token, and drafting then goes k positions further.
    """
    return -(-(num_tokens + 2 * num_drafts) // block_size)
