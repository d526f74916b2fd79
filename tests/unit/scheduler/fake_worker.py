"""Workers without a model. They keep the rows that step messages describe. In place of the KV, they
keep checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.kv.block_pool import DUMMY_BLOCK
from dist_aclgraph.steps.step import RankBatch, RankPlan, RowSampling, StepPlan, StepResult
from dist_aclgraph.topology import MAY_LOSE_TOKENS
from tests.unit.scheduler.fake_states import FakeStates

SPOILT = 10_000  # a token that was sampled without a mask
WRONG = -2  # the KV of a rejected draft or of a void step


def next_token(tokens: Sequence[int], vocabulary: int) -> int:
    """Return the token that the fake model generates after all of ``tokens``."""
    return zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes()) % vocabulary


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    sampling: RowSampling
    latest: list[int] = field(default_factory=list)  # tokens that the last step has sampled
    has_drafts: bool | None = False  # None: unknown until the row's next step


class FakeWorker:
    """Runs the steps of one data-parallel rank, and checks that the cache contains the right KV for
    every token.

    Args:
        num_drafts: number of draft tokens that each row gets when it has sampled a token.
        accept: function that returns the number of accepted drafts for each verification.
        has_state: whether the worker also checks recurrent states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocabulary: int = 50,
        *,
        num_drafts: int = 0,
        accept: Callable[[], int] = lambda: 0,
        has_state: bool = False,
    ) -> None:
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.cache = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.rows: dict[int, Row] = {}
        self.last_plan: RankPlan | None = None
        self._written: list[list[tuple[int, int]]] = []  # for each step, (block, slot in the block)
        self._drafted: set[int] = set()  # rows that may still have drafts when they are sent again
        self._num_drafts = num_drafts
        self._accept = accept
        self.states = FakeStates() if has_state else None

    def execute(self, plan: RankPlan, rank: int = 0, *, is_void: bool = False) -> StepResult:
        """Run one step. If ``is_void``, the step loses tokens in the exchange with experts, so its
        results are void.
        """
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=RankPlan)
        self.last_plan = plan
        self._written.append([])
        batch = plan.batch
        records = unpack_ints(batch.scheduled, 4)
        self._update_rows(batch, records)
        assert len({int(row) for row in records[:, 0]}) == len(records), "a row runs twice"
        if self.states is not None:
            assert not is_void, "a model with state must not lose tokens"
            self.states.begin(batch)
        else:
            assert not batch.restored and not batch.kept
        found = [self._run(*record, is_void=is_void) for record in records.tolist()]
        if self.states is not None:
            self.states.end(batch)
        if not is_void:
            for row_index, computed, length, _ in records.tolist():
                self._check_cache(self.rows[row_index], computed + length)
        for row_index, tokens in zip(records[:, 0].tolist(), found, strict=True):
            self.rows[row_index].latest = tokens
        sampled = [tokens for tokens in found if tokens]
        counts = [len(tokens) for tokens in sampled]
        return StepResult(
            plan.epoch,
            plan.step,
            rank,
            pack_ints([token for tokens in sampled for token in tokens]),
            pack_ints(counts) if (records[:, 3] > 1).any() else b"",
            num_unplaced=int(is_void),
        )

    def resume(self, num_in_flight: int) -> None:
        """Abort the last ``num_in_flight`` steps: what they have written becomes invalid, and the
        host drops its rows.

        The device keeps the drafts that it has.
        """
        for written in self._written[len(self._written) - num_in_flight :]:
            for block_id, place in written:
                self.cache[block_id, place] = WRONG
        rows = self.rows.items()
        self._drafted = {index for index, row in rows if row.has_drafts is not False or row.latest}
        self.rows.clear()
        if self.states is not None:
            self.states.resume(num_in_flight)

    def spoil(self, index: int) -> None:
        """Make the last tokens of row ``index`` wrong, so that the scheduler must send the row
        again.
        """
        row = self.rows[index]
        row.latest = [SPOILT] * len(row.latest)
        self._drafted.add(index)
        if self.states is not None:
            self.states.spoil(index)

    def lose_kv(self) -> None:
        """Make all KV in the cache invalid."""
        self.cache[:] = WRONG
        if self.states is not None:
            self.states.lose()

    def _update_rows(self, batch: RankBatch, records: np.ndarray) -> None:
        for start in batch.started:
            tokens = unpack_ints(start.token_ids).tolist()
            self.rows[start.row] = Row(
                tokens,
                unpack_ints(start.block_ids).tolist(),
                start.sampling,
                has_drafts=None if start.row in self._drafted else False,
            )
        self._drafted -= {start.row for start in batch.started}
        for row, token_id in unpack_ints(batch.appended, 2).tolist():
            tokens = self.rows[row].tokens
            assert token_id == next_token(tokens, self.vocabulary), "not what was sampled"
            tokens.append(token_id)
            self.rows[row].has_drafts = self._num_drafts > 0
        for row, index, block_id in unpack_ints(batch.blocks, 3).tolist():
            assert index == len(self.rows[row].blocks), "a block table has a hole"
            self.rows[row].blocks.append(block_id)

    def _run(
        self, index: int, computed: int, length: int, num_logits: int, *, is_void: bool
    ) -> list[int]:
        """Run ``length`` tokens of one row after ``computed`` tokens; return its new tokens. Before
        the end of the prompt, the returned list is empty.
        """
        row = self.rows[index]
        if row.has_drafts is None:
            row.has_drafts = num_logits > 1
        known = num_received = len(row.tokens)
        if computed >= known:  # the host does not have the previous step's tokens yet
            assert computed == known and row.latest, "a token is missing"
            assert length == num_logits == self._num_drafts + 1
            computed += len(row.latest) - 1
            tokens, has_drafts = [*row.tokens, *row.latest], self._num_drafts > 0
            row = Row(tokens, row.blocks, row.sampling, has_drafts=has_drafts)
            known = len(row.tokens)
        beyond = computed + length - known
        assert beyond == num_logits - 1 if num_logits else beyond < 0, "samples at other tokens"
        assert num_logits <= 1 or row.has_drafts
        assert num_logits == self._num_drafts + 1 or not row.has_drafts
        tokens = list(row.tokens)
        for _ in range(0 if num_logits == 0 else 1 + (self._accept() if num_logits > 1 else 0)):
            tokens.append(next_token(tokens, self.vocabulary))
        right = WRONG if is_void else max(known, len(tokens) - 1)
        for position in range(computed, computed + length):
            if position // self.block_size < len(row.blocks):
                self._write(row, tokens, position, position < right)
            else:  # a position after the request's last possible token, which has no slot
                assert position >= num_received
        if self.states is not None:
            self._run_state(index, tokens, computed, length, is_verified=num_logits > 1)
        return tokens[known:]

    def _run_state(
        self, index: int, tokens: list[int], computed: int, length: int, *, is_verified: bool
    ) -> None:
        """Update the recurrent state of a row by the tokens of a step.

        Args:
            tokens: the row's tokens, including new ones. Positions behind these tokens contain
                rejected drafts.
        """
        assert self.states is not None
        before, after = tokens[:computed], [*tokens, *[WRONG] * length]
        ran = after[computed : computed + length]
        if is_verified:
            passed = len(tokens) - 2 - computed
            ran[passed + 1 :] = [WRONG] * (length - 1 - passed)
            self.states.verify(index, before, ran, passed)
        else:
            self.states.run(index, before, ran)

    def _write(self, row: Row, tokens: list[int], position: int, is_right: bool) -> None:
        block_id = row.blocks[position // self.block_size]
        assert block_id != DUMMY_BLOCK
        self._written[-1].append((block_id, position % self.block_size))
        value = WRONG
        if is_right:
            # The KV of a token depends on all tokens up to it.
            value = zlib.crc32(np.asarray(tokens[: position + 1], dtype="<i4").tobytes())
        self.cache[block_id, position % self.block_size] = value

    def _check_cache(self, row: Row, end: int) -> None:
        prefix = 0
        for position in range(min(end, len(row.tokens))):
            token = np.asarray(row.tokens[position : position + 1], dtype="<i4").tobytes()
            prefix = zlib.crc32(token, prefix)
            block_id = row.blocks[position // self.block_size]
            assert self.cache[block_id, position % self.block_size] == prefix, (
                f"position {position} holds the KV of another prefix"
            )


class FakeGroup:
    """All ranks of a lockstep group. Of each data-parallel rank, the first tensor-parallel rank
    reports the output.

    Args:
        tp: number of tensor-parallel ranks of each data-parallel rank.
        lose: function that returns whether a step loses tokens. It is called only if the step's
            exchange can lose tokens.
        compile_steps: function that is called when a rank samples for a row. It returns the number
            of further steps in which this rank still compiles the row's grammar; 0 if the grammar
            is compiled.
    """

    def __init__(
        self,
        workers: Sequence[FakeWorker],
        tp: int = 1,
        lose: Callable[[], bool] = lambda: False,
        compile_steps: Callable[[], int] = lambda: 0,
    ) -> None:
        self.workers = workers
        self._tp = tp
        self._lose = lose
        self._compile_steps = compile_steps
        # For each rank, a dict from a row to the number of steps until the rank has compiled the
        # row's grammar.
        self._compiling: list[dict[int, int]] = [{} for _ in range(len(workers) * tp)]
        self.num_unmasked = 0

    def execute(self, plan: StepPlan) -> list[StepResult]:
        assert len(plan.batches) == len(self.workers)
        can_lose = plan.exchange in MAY_LOSE_TOKENS
        results = []
        for dp_rank, worker in enumerate(self.workers):
            is_void = can_lose and self._lose()
            owner = dp_rank * self._tp
            batch = plan.batches[dp_rank]
            first = worker.execute(plan.for_rank(dp_rank), owner, is_void=is_void)
            others = range(owner + 1, owner + self._tp)
            found = [first, *(StepResult(plan.epoch, plan.step, other) for other in others)]
            found = [self._mask(result, batch) for result in found]
            results += self._spoil(found, worker, batch)
        return results[::-1]

    def _mask(self, result: StepResult, batch: RankBatch) -> StepResult:
        """Return a rank's result, with additional fields: the samples that had no mask, and the
        rows whose grammars are still being compiled.
        """
        compiling = self._compiling[result.rank]
        sampled = sampled_rows(batch)
        compiling |= {row: self._compile_steps() for row in sampled if not compiling.get(row)}
        unmasked = [i for i, row in enumerate(sampled) if compiling.get(row)]
        for row, steps in list(compiling.items()):
            compiling[row] = max(0, steps - 1)
        return msgspec.structs.replace(
            result,
            unmasked=pack_ints(unmasked),
            compiling=pack_ints([row for row, steps in compiling.items() if steps]),
        )

    def _spoil(
        self, results: list[StepResult], worker: FakeWorker, batch: RankBatch
    ) -> list[StepResult]:
        """Return the results. Replace tokens that were sampled without a mask on at least one rank
        by wrong tokens.
        """
        unmasked = sorted({i for result in results for i in unpack_ints(result.unmasked).tolist()})
        self.num_unmasked += len(unmasked)
        first, *others = results
        tokens, sampled = unpack_ints(first.token_ids).copy(), sampled_rows(batch)
        counts = unpack_ints(first.counts) if first.counts else np.ones(len(sampled), np.int32)
        ends = np.cumsum(counts)
        for index in unmasked:
            tokens[ends[index] - counts[index] : ends[index]] = SPOILT
            worker.spoil(sampled[index])
        return [msgspec.structs.replace(first, token_ids=pack_ints(tokens)), *others]


def sampled_rows(batch: RankBatch) -> list[int]:
    records = unpack_ints(batch.scheduled, 4)
    rows: list[int] = records[records[:, 3] > 0, 0].tolist()
    return rows
