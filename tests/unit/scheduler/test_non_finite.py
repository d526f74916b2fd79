"""A request whose KV contains NaN ends with an error. No other request reads this KV."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.look_ups import Files, LookUps
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import RankBatch, RankPlan, StepPlan, StepResult
from tests.laws import examples
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeWorker, Row, next_token
from tests.unit.scheduler.requests import submit
from tests.unit.scheduler.test_scheduler import make_request, make_scheduler, run

NUM_BLOCKS, BLOCK, VOCAB, POISON, NAN = 11, 4, 50, 49, -7


class NanWorker(FakeWorker):
    """A worker whose model computes NaN from the token ``POISON`` on. Its attention reads whole
    blocks.
    """

    def execute(self, plan: RankPlan, *args: Any, **options: Any) -> StepResult:
        result = super().execute(plan, *args, **options)
        records = unpack_ints(plan.batch.scheduled, 4).tolist()
        sampled = [record for record in records if record[3]]
        found = [
            index
            for index, (row, computed, length, _) in enumerate(sampled)
            if self._is_nan(self.rows[row], computed + length)
        ]
        return StepResult(
            result.epoch, result.step, 0, result.token_ids, non_finite=pack_ints(found)
        )

    def _update_rows(self, batch: RankBatch, records: np.ndarray) -> None:
        self.cache[unpack_ints(batch.cleaned)] = -1
        super()._update_rows(batch, records)

    def _write(self, row: Row, tokens: list[int], position: int, is_right: bool) -> None:
        is_nan = POISON in tokens[: position + 1] or self._is_nan(row, position)
        super()._write(row, tokens, position, is_right)
        if is_nan:
            self.cache[row.blocks[position // BLOCK], position % BLOCK] = NAN

    def _check_cache(self, row: Row, end: int) -> None:
        if not self._is_nan(row, end):
            super()._check_cache(row, end)

    def _is_nan(self, row: Row, end: int) -> bool:
        return bool((self.cache[row.blocks[: -(-end // BLOCK)]] == NAN).any())


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=18)


@examples(300)
@given(st.data(), st.integers(1, 2))
def test_nan_of_a_request_never_reaches_other_requests(data: st.DataObject, depth: int) -> None:
    pool = BlockPool(NUM_BLOCKS, BLOCK)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=4, max_waiting=100)
    scheduler = Scheduler(config, [pool], GraphDispatcher(make_plan(1, 4)), max_model_len=32)
    worker = NanWorker(NUM_BLOCKS, BLOCK, VOCAB - 1)
    expected: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    failed: set[str] = set()
    poisoned: set[str] = set()
    has_aborted = False
    in_flight: list[StepPlan] = []
    for name in map(str, range(data.draw(st.integers(1, 8)))):
        prompt = data.draw(prompts)
        if data.draw(st.integers(0, 2)) == 0:
            prompt.insert(data.draw(st.integers(0, len(prompt))), POISON)
            poisoned.add(name)
        count = data.draw(st.integers(1, 6))
        scheduler.add(submit(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
        known = list(prompt)
        for _ in range(count):
            known.append(next_token(known, VOCAB - 1))
        expected[name], tokens[name] = known[len(prompt) :], []

    while scheduler.has_work:
        if poisoned - failed and data.draw(st.integers(0, 5)) == 0:
            has_aborted, name = True, min(poisoned - failed)
            scheduler.abort(name)
            failed.add(name)
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) == depth):
            outputs = scheduler.update([worker.execute(in_flight.pop(0).for_rank(0))])
            for delta in outputs:
                tokens[delta.request_id] += delta.tokens
            failed |= {request.request_id for request, _ in outputs.failed}

    assert failed == poisoned
    assert all(tokens[name] == ([] if name in poisoned else expected[name]) for name in tokens)
    assert pool.num_used == 0
    nan_blocks = set(np.flatnonzero((worker.cache == NAN).any(axis=1)).tolist())
    assert has_aborted or nan_blocks <= set(pool.take_dirty())


def test_a_second_result_that_is_not_finite_ends_the_request_and_its_blocks_are_cleaned() -> None:
    scheduler = make_scheduler(block_size=16)
    scheduler.add(make_request("bad", 20))
    scheduler.add(make_request("good", 20, first=100))

    scheduler.schedule()
    [delta] = run(scheduler, 0, 11, non_finite=pack_ints([0]))
    assert (delta.request_id, delta.tokens) == ("good", [11])
    again = scheduler.schedule()
    assert again is not None
    assert [unpack_ints(start.token_ids).tolist() for start in again.batches[0].started] == [
        list(range(20))
    ]
    assert set(unpack_ints(again.batches[0].cleaned)) == {0, 1, 2}
    result = StepResult(0, scheduler.step, 0, pack_ints([12, 0]), non_finite=pack_ints([1]))
    outputs = scheduler.update([result])

    assert [request.request_id for request, _ in outputs.failed] == ["bad"]
    assert scheduler.stats()["non_finite"] == 1
    assert not any(scheduler.ranks[0].pool.hash_of(block_id) for block_id in (1, 2))


def test_blocks_with_nan_are_no_longer_found_and_are_cleaned_when_the_last_user_leaves() -> None:
    pool = BlockPool(8, BLOCK)
    [block] = pool.allocate(1)
    pool.store(block, b"hash")
    pool.share([block])

    pool.condemn([block])
    assert pool.match([b"hash"]) == []
    pool.free([block])
    assert pool.take_dirty() == []
    pool.free([block])
    assert (pool.take_dirty(), pool.take_dirty()) == ([0, block], [])


def test_a_suspect_request_runs_in_clean_blocks_that_it_shares_with_nobody() -> None:
    scheduler = make_scheduler(block_size=4)
    pool = scheduler.ranks[0].pool
    scheduler.add(make_request("before", 6, max_tokens=1))
    scheduler.schedule()
    run(scheduler, 11)
    assert pool.num_cached == 1
    suspect = make_request("suspect", 8, max_tokens=4)
    suspect.is_suspect = True
    scheduler.add(suspect)

    plan = scheduler.schedule()
    assert plan is not None
    [start] = plan.batches[0].started
    assert unpack_ints(plan.batches[0].scheduled, 4)[0].tolist() == [start.row, 0, 8, 1]
    assert set(unpack_ints(start.block_ids)) | {0} == set(unpack_ints(plan.batches[0].cleaned))
    cleaned: set[int] = set()
    for token in (11, 12, 13, 14):
        run(scheduler, token)
        plan = scheduler.schedule()
        cleaned |= set() if plan is None else set(unpack_ints(plan.batches[0].cleaned).tolist())

    assert len(cleaned - {0}) == 1, "the block that its output needed"
    assert pool.num_cached == 1


def test_files_of_blocks_that_might_contain_nan_are_not_read() -> None:
    """A block can be in a file before the request's first logits show that it contains NaN."""
    files: set[bytes] = set()
    scheduler = make_scheduler(look_ups=LookUps(Files(files.__contains__)))
    request = make_request("first", 33, max_tokens=1)
    scheduler.add(request)
    scheduler.schedule()
    run(scheduler, 0, non_finite=pack_ints([0]))
    scheduler.schedule()
    run(scheduler, 5)
    files.update(request.hashes)
    scheduler.add(make_request("second", 33))
    assert scheduler.schedule() is not None and not scheduler.copies.is_running
