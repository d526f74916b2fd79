"""The running batch of a worker. The engine's message for each step updates the rows of the batch.

If two successive decode steps have the same requests, the inputs of the second step are computed
from the inputs of the first step (``_go_on``). Arrays that do not change are not copied.

The batch is in host memory only. The batch does not contain the tokens that a step in flight
samples. The inputs of the next step contain references to these tokens. The device replaces each
reference by its token. Every rank of a tensor parallel group has the same rows, because every rank
receives the same plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.engine.sampling.sampling_table import SamplingTable
from dist_aclgraph.planning.step_sizes import table_width
from dist_aclgraph.steps.draft_places import draft_places
from dist_aclgraph.steps.host_step import NO_INTS, NO_RECORDS, NO_STEP, HostStep
from dist_aclgraph.steps.prompt_share import share_prompts
from dist_aclgraph.steps.references import References
from dist_aclgraph.steps.step import RankBatch

# The change of a request's record from one decode step to the next: one more computed token.
ONE_FURTHER = np.array([0, 1, 0, 0], np.int32)


class ComingTokens(NamedTuple):
    """Tokens that a step in flight samples: for each token, its row and the reference to the token,
    [n] each.
    """

    rows: IntArray
    references: IntArray


class InputBatch:
    """Owns tokens, block tables and sampling parameters of all rows.

    Attributes:
        references: makes references to tokens that are not yet on the host.
    """

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        place: ContextPlace,
        num_latest: int,
        num_drafts: int = 0,
    ) -> None:
        """Allocate the arrays.

        Args:
            place: indices of this rank in context parallelism.
            num_latest: number of sampled tokens and drafts in the device's table. References point
                to tokens of this table.
        """
        self._place = place
        # The device has one row more than the host: a spare row, for padding requests.
        self.references = References(num_latest, num_drafts, max_rows + 1)
        self._num_drafts = num_drafts
        # ``_sample_of``: for each row, the index of its sample in the last step that sampled the
        # row. ``_sampled_rows``: the rows that the last step sampled.
        self._sample_of: IntArray = np.zeros(max_rows, dtype=np.int32)
        self._sampled_rows = NO_INTS
        # References to the samples of the last step, and the row of each sample.
        self._names = self._named_rows = NO_INTS
        # The last step and its records. ``_last`` is None if the next step cannot be computed from
        # the last step. ``_num_left`` says how many further steps may be computed in this way
        # before a request needs a new block.
        self._last: HostStep | None = None
        self._records = NO_RECORDS
        self._num_left = 0
        block_size = place.shards.tokens_per_block
        # A row has space for one token after the model's context: the last sampled token, which the
        # model never runs.
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
        """Update the rows with the changes of a step."""
        if batch.started:
            self._last = None
        for start in batch.started:
            row = start.row
            tokens, blocks = unpack_ints(start.token_ids), unpack_ints(start.block_ids)
            self.token_ids[row, : len(tokens)] = tokens
            self.num_tokens[row] = len(tokens)
            self.block_table[row, : len(blocks)] = blocks
            # The positions of drafts can be after the row's last block. The entries for these
            # positions must not contain a block of another request.
            self.block_table[row, len(blocks) :] = 0
            self.sampling.set(row, start.sampling)
        if batch.blocks:
            rows, indices, ids = unpack_ints(batch.blocks, 3).T
            self.block_table[rows, indices] = ids
            self._num_left = 0
        if batch.appended:
            self._append(*unpack_ints(batch.appended, 2).T)

    def _append(self, rows: IntArray, tokens: IntArray) -> None:
        """Append tokens to rows; tokens of the same row are neighbours in the arrays."""
        if (rows[1:] != rows[:-1]).all():  # one token per row
            self.token_ids[rows, self.num_tokens[rows]] = tokens
            self.num_tokens[rows] += 1
            return
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        counts = np.diff(starts, append=len(rows)).astype(np.int32)
        index = np.arange(len(rows), dtype=np.int32) - np.repeat(starts, counts)
        self.token_ids[rows, self.num_tokens[rows] + index] = tokens
        self.num_tokens[rows[starts]] += counts

    def step_inputs(self, records: IntArray, *, moves: bool = False) -> HostStep:
        """Return the inputs of a step: the scheduled tokens that this rank runs.

        Args:
            records: [num_reqs, 4], for each request: row, num_computed_tokens,
                num_scheduled_tokens, num_logits.
            moves: whether earlier steps are in flight. With drafts, only the device then knows the
                positions of requests with tokens in flight: the numbers of accepted drafts are not
                on the host yet.
        """
        last, self._last = self._last, None
        if not len(records):
            return self._idle
        if last is not None and np.array_equal(records, self._records + ONE_FURTHER):
            self._last, self._records = self._go_on(last), records
            return self._last
        rows, computed, scheduled, num_logits = records.T
        kv_lens = computed + scheduled
        query_ends = np.cumsum(scheduled, dtype=np.int32)
        if int(query_ends[-1]) == len(rows):  # one token per request: decoding
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, scheduled)
            starts = np.repeat(computed - (query_ends - scheduled), scheduled)
            positions = np.arange(query_ends[-1], dtype=np.int32) + starts
        place, k = self._place, self._num_drafts
        slots = place.shards.slots_of(place.shard, self.block_table, token_rows, positions)
        block_table = self._table_of(rows, kv_lens)
        sampled = np.flatnonzero(num_logits)
        if k == 0:
            token_ids = self._tokens(token_rows, positions)
            places, next_tokens, drafts = query_ends[sampled] - 1, NO_INTS, None
        else:
            begins = np.repeat(computed, scheduled)
            token_ids, next_tokens = self._tokens_and_next(token_rows, positions, begins)
            drafts = draft_places(records, k, self.block_table, place, self.sampling.may_draft)
            if moves:
                drafts = drafts.moved(self.in_flight(records)[sampled])
            places = drafts.places.ravel()
        step = HostStep(
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_ends=query_ends,
            kv_lens=kv_lens,
            block_table=block_table,
            sampled=sampled,
            sampled_rows=rows[sampled],
            num_logits=num_logits[sampled],
            places=places,
            next_tokens=next_tokens,
            drafts=drafts,
        )
        if k == 0 and place.num_prompt_ranks == 1 and step.num_tokens == len(rows) == len(sampled):
            self._last, self._records = step, records
            self._num_left = self._steps_left(positions)
        return share_prompts(step, place.num_prompt_ranks, place.prompt_rank)

    def _go_on(self, last: HostStep) -> HostStep:
        """Return the inputs of the decode step after ``last``. This step runs the next token of
        each request of ``last``.
        """
        rows, positions, kv_lens = last.rows, last.positions + 1, last.kv_lens + 1
        if self._num_left:
            self._num_left -= 1
            slots, block_table = last.slots + 1, last.block_table
        else:
            place = self._place
            slots = place.shards.slots_of(place.shard, self.block_table, rows, positions)
            block_table = self._table_of(rows, kv_lens)
            self._num_left = self._steps_left(positions)
        return HostStep(
            rows=rows,
            token_ids=self._tokens(rows, positions),
            positions=positions,
            slots=slots,
            query_ends=last.query_ends,
            kv_lens=kv_lens,
            block_table=block_table,
            sampled=last.sampled,
            sampled_rows=last.sampled_rows,
            num_logits=last.num_logits,
            places=last.places,
            next_tokens=last.next_tokens,
            drafts=None,
        )

    def _table_of(self, rows: IntArray, kv_lens: IntArray) -> IntArray:
        """Return the block table of ``rows``, with as many columns as the longest request needs."""
        per_block = self._place.shards.tokens_per_block
        width = table_width(int(kv_lens.max()), per_block, self._num_drafts)
        table: IntArray = self.block_table[rows, :width]
        return table

    def _steps_left(self, positions: IntArray) -> int:
        """Return the number of further decode steps in which no request needs a new block."""
        # The next slot is not always the last slot plus one, because the next token might be on
        # another shard.
        if self._place.is_sharded:
            return 0
        per_block = self._place.shards.tokens_per_block
        return per_block - 1 - int((positions % per_block).max())

    def note_samples(self, step: HostStep) -> None:
        """Store which rows the step samples, because the next step can refer to these samples."""
        if step.sampled_rows is not self._sampled_rows:
            self._sample_of[step.sampled_rows] = np.arange(step.num_samples, dtype=np.int32)
            self._sampled_rows, self._named_rows = step.sampled_rows, NO_INTS

    def in_flight(self, records: IntArray) -> npt.NDArray[np.bool_]:
        """Return [num_reqs] booleans: true for a request whose last token is not on the host yet.

        Args:
            records: [num_reqs, 4], for each request: row, num_computed_tokens,
                num_scheduled_tokens, num_logits.
        """
        is_in_flight: npt.NDArray[np.bool_] = records[:, 1] >= self.num_tokens[records[:, 0]]
        return is_in_flight

    def coming_tokens(
        self, step: HostStep, is_wanted: npt.NDArray[np.bool_]
    ) -> ComingTokens | None:
        """Return the wanted rows' last tokens, but only the tokens that the host does not have yet;
        None if there are no such tokens.

        Args:
            is_wanted: [max_rows], whether the caller wants the row's last token.
        """
        begins = step.kv_lens - step.query_ends
        begins[1:] += step.query_ends[:-1]
        rows = step.rows[is_wanted[step.rows] & (begins >= self.num_tokens[step.rows])]
        if not len(rows):
            return None
        if self._num_drafts:
            references = self.references.last(rows)
        else:
            references = self.references.sample(self._sample_of[rows])
        return ComingTokens(rows, references)

    def _tokens(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the tokens at ``positions``, for a deployment without drafts."""
        is_here = positions < self.num_tokens[rows]
        if is_here.all():
            return self.token_ids[rows, positions]
        if rows is not self._named_rows:
            self._names, self._named_rows = self.references.sample(self._sample_of[rows]), rows
        if not is_here.any():
            return self._names
        return np.where(is_here, self.token_ids[rows, positions], self._names)

    def _tokens_and_next(
        self, rows: IntArray, positions: IntArray, begins: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return two arrays: the token at each position, and the token at the position after it. An
        element of the second array is 0 if the host does not know the token.

        Args:
            begins: [num_tokens], for each token, the first position of its row in this step. If the
                token at the first position is not on the host, it is the row's last token. The
                row's other tokens in the step are then drafts.
        """
        known = self.num_tokens[rows]
        last = self.token_ids.shape[1] - 1
        token_ids = self.token_ids[rows, np.minimum(positions, last)]
        after = self.token_ids[rows, np.minimum(positions + 1, last)]
        index = positions - begins
        names = self.references
        references = np.where(index == 0, names.last(rows), names.draft(rows, index - 1))
        return (
            np.where(positions < known, token_ids, references).astype(np.int32),
            np.where(positions + 1 < known, after, 0).astype(np.int32),
        )
