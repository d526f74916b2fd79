"""Laws of the scheduler under random arrivals, lengths, aborts, preemptions and lost workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.graph.dispatcher import GraphDispatcher
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import RequestOutput
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.scheduler.step import unpack_ints
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeWorker, next_token
from tests.unit.scheduler.requests import EOS, submit

VOCABULARY = 40
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
PREFIX = list(range(100, 116))  # prompts begin alike, so that the prefix cache has work


@dataclass(frozen=True)
class Arrival:
    at_step: int
    shared: int  # tokens of PREFIX
    own: int
    max_tokens: int | None
    ignore_eos: bool
    min_tokens: int
    abort_at: int | None  # step, counted from the arrival
    in_flight: bool  # abort while the step runs

    def prompt(self, index: int) -> list[int]:
        return PREFIX[: self.shared] + [1000 + index] * self.own

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            min_tokens=min(self.min_tokens, self.max_tokens or 99),
        )

    def expected(self, index: int) -> tuple[list[int], str]:
        """Return the output that the request must have, whatever else runs beside it."""
        tokens = self.prompt(index)
        start = len(tokens)
        limit = min(MAX_MODEL_LEN, start + (self.max_tokens or MAX_MODEL_LEN))
        while True:
            tokens.append(next_token(tokens, VOCABULARY))
            if (
                tokens[-1] == EOS
                and not self.ignore_eos
                and len(tokens) - start > self.params().min_tokens
            ):
                return tokens[start:], "stop"
            if len(tokens) >= limit:
                return tokens[start:], "length"


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 30),
        shared=st.integers(0, 16),
        own=st.integers(1, 14),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 5),
        abort_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        in_flight=st.booleans(),
    ),
    min_size=1,
    max_size=12,
).map(lambda found: sorted(found, key=lambda arrival: arrival.at_step))


def make_scheduler(
    max_num_seqs: int, max_tokens: int, num_blocks: int, prefix_cache: bool
) -> Scheduler:
    plan = make_plan(1, 2, 4)
    return Scheduler(
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
        [BlockPool(num_blocks, BLOCK_SIZE, prefix_cache=prefix_cache)],
        GraphDispatcher(plan),
        max_model_len=MAX_MODEL_LEN,
    )


def assert_consistent(scheduler: Scheduler, worker: FakeWorker, max_tokens: int) -> None:
    """The worker's rows equal the scheduler's, and no two rows may write to one block."""
    plan = worker.last_plan
    assert plan is not None
    records = unpack_ints(plan.batches[0].scheduled, 4)
    assert 0 < records[:, 2].sum() <= max_tokens
    assert plan.graph is None or plan.graph.num_tokens >= records[:, 2].sum()
    assert all(length > 0 for length in records[:, 2])
    writable: Counter[int] = Counter()
    pool = scheduler.ranks[0].pool
    scheduled = set(records[:, 0].tolist())
    for request in scheduler.running:
        if request.row in scheduled:
            row = worker.rows[request.row]
            assert row.tokens == request.tokens
            assert row.blocks == request.block_ids
        first = request.num_computed_tokens // BLOCK_SIZE
        writable.update(request.block_ids[first:])
        assert not any(pool.is_stored(block) for block in request.block_ids[first:])
    assert not writable or max(writable.values()) == 1
    arrived = [int(request.request_id) for request in [*scheduler.running, *scheduler.waiting]]
    assert arrived == sorted(arrived), "requests are ordered by arrival"
    rows = [request.row for request in scheduler.running]
    assert len(set(rows)) == len(rows)


@settings(max_examples=100)
@given(
    arrivals,
    st.integers(1, 5),
    st.integers(5, 40),
    st.integers(13, 40),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 40)),
)
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    plan_of_arrivals, max_num_seqs, max_tokens, num_blocks, prefix_cache, lost_at
) -> None:
    scheduler = make_scheduler(max_num_seqs, max_tokens, num_blocks, prefix_cache)
    worker = FakeWorker(num_blocks, BLOCK_SIZE)
    worker.vocabulary = VOCABULARY
    got: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in reasons, "a finished request goes on"
            got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason

    def abort(step: int, in_flight: bool) -> None:
        for index, arrival in enumerate(plan_of_arrivals):
            if arrival.abort_at is None or arrival.in_flight != in_flight:
                continue
            if arrival.at_step + arrival.abort_at == step and str(index) in got:
                output = scheduler.abort(str(index))
                assert (output is None) == (str(index) in reasons)
                if output is not None:
                    take([output])

    for step in range(3000):
        for index, arrival in enumerate(plan_of_arrivals):
            if arrival.at_step == step:
                scheduler.add(submit(str(index), arrival.prompt(index), arrival.params()))
                got[str(index)] = []
        abort(step, in_flight=False)
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            if step > 60:
                break
            continue
        result = worker.execute(plan)
        assert_consistent(scheduler, worker, max_tokens)
        abort(step, in_flight=True)
        if step == lost_at:
            worker.lose_cache()
            scheduler.restart(epoch=scheduler.epoch + 1)
        take(scheduler.update([result]))

    assert not scheduler.has_work and scheduler.num_requests == 0
    assert scheduler.ranks[0].pool.num_used == 0
    assert reasons.keys() == got.keys()
    for index, arrival in enumerate(plan_of_arrivals):
        tokens, reason = arrival.expected(index)
        if reasons[str(index)] == "abort":
            assert got[str(index)] == tokens[: len(got[str(index)])]
        else:
            assert (got[str(index)], reasons[str(index)]) == (tokens, reason)
