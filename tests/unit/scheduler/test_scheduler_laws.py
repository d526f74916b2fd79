"""Laws of the scheduler for any number of data-parallel ranks.

Arrivals, lengths, aborts, preemptions, rejected drafts, lost tokens, grammars that are late, and
failures of devices are random.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.kv.events import CacheEvents
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.padding import GraphLens
from dist_aclgraph.steps.step import StepPlan, StepResult, StepSize
from dist_aclgraph.topology import ExchangeKind
from tests.kv_subscriber import Subscriber
from tests.laws import examples, is_full
from tests.plans import make_plan
from tests.unit.scheduler.fake_files import FakeFiles
from tests.unit.scheduler.fake_worker import FakeGroup, FakeWorker, next_token
from tests.unit.scheduler.requests import EOS, submit

VOCABULARY = 40
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
PREFIX = list(range(100, 116))  # prompts begin with a part of PREFIX, so that they share blocks


@dataclass(frozen=True)
class Arrival:
    at_step: int
    shared: int  # number of tokens of PREFIX with which the prompt begins
    own: int
    max_tokens: int | None
    ignore_eos: bool
    min_tokens: int
    abort_at: int | None  # number of steps from the arrival to the abort
    in_flight: bool  # whether the abort comes while the step runs
    emitted: int = 0  # number of output tokens that the request has at its arrival

    def prompt(self, index: int) -> list[int]:
        return PREFIX[: self.shared] + [1000 + index] * self.own

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            min_tokens=min(self.min_tokens, self.max_tokens or 99),
        )

    def expected(self, index: int) -> tuple[list[int], str]:
        """Return the output that the request must get, whatever other requests run with it."""
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
        emitted=st.one_of(st.just(0), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=12,
).map(lambda found: sorted(found, key=lambda arrival: arrival.at_step))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a group, its limits, and the random events that happen to it."""

    dp: int
    tp: int
    num_drafts: int
    max_num_seqs: int
    spare_tokens: int  # tokens that a step can run in addition to a decode of all rows
    num_blocks: int
    prefix_cache: bool
    loses_tokens: bool
    compiles: bool = False  # whether some requests must wait for their grammars
    counts_shared: bool = False
    in_flight: int = 2
    exact: bool = False
    num_checkpoints: int | None = None  # None: the model has no recurrent state
    interval: int = 1  # number of blocks between two checkpoints
    has_files: bool = False  # whether blocks are copied to files and back

    @property
    def max_tokens(self) -> int:
        return self.max_num_seqs * (self.num_drafts + 1) + self.spare_tokens


shapes = st.builds(
    Shape,
    dp=st.integers(1, 4),
    tp=st.integers(1, 2),
    num_drafts=st.integers(0, 3),
    max_num_seqs=st.integers(1, 5),
    spare_tokens=st.integers(0, 30),
    num_blocks=st.integers(13, 40),
    prefix_cache=st.booleans(),
    loses_tokens=st.booleans(),
    compiles=st.booleans(),
    counts_shared=st.booleans(),
    in_flight=st.integers(1, 2),
)


def with_files(shape: Shape) -> Shape:
    return replace(shape, prefix_cache=True, has_files=True)


shapes_with_files = shapes.map(with_files)
# With ``counts_shared``, decode steps run without a graph if the cache is full. Eager steps are not
# exact, so ``counts_shared`` is off here.
exact_shapes = shapes.map(
    lambda s: replace(s, num_drafts=0, prefix_cache=False, counts_shared=False, exact=True)
)


# A step of a model with recurrent state cannot run twice, so its exchange must not lose tokens.
stateful_shapes = st.builds(
    lambda shape, count, interval: replace(
        shape, loses_tokens=False, num_checkpoints=count, interval=interval
    ),
    shapes,
    st.integers(0, 6),
    st.integers(1, 4),
)


def exchange_of(num_tokens: int) -> ExchangeKind:
    return "mc2" if num_tokens <= 8 else "all_to_all"


def exchange_without_loss(num_tokens: int) -> ExchangeKind:
    return "mc2" if num_tokens <= 8 else "all_gather"


def counted_blocks(plan: StepPlan, records: np.ndarray) -> int:
    """Return the number of blocks that attention counts for a rank. Attention counts, for each
    request (padding included), the number of blocks that the request's length needs.
    """
    kv_lens = records[:, 1] + records[:, 2]
    lens = kv_lens.tolist()
    if plan.graph is not None and plan.graph.mode == "FULL":
        ends = np.cumsum(records[:, 2], dtype=np.int32)
        lens = GraphLens(ContextPlace(Shards(BLOCK_SIZE))).pad(plan.graph, ends, kv_lens).kv_lens[0]
    return sum(-(-length // BLOCK_SIZE) for length in lens)


@dataclass
class World:
    """A scheduler, its ranks, and all outputs of each request."""

    shape: Shape
    seed: int
    got: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    # results of the steps in flight
    results: deque[list[StepResult]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        shape, chance = self.shape, random.Random(self.seed)
        query_len = shape.num_drafts + 1
        plan = make_plan(query_len, 2 * query_len, 4 * query_len, query_len=query_len)
        workers = [
            FakeWorker(
                shape.num_blocks,
                BLOCK_SIZE,
                VOCABULARY,
                num_drafts=shape.num_drafts,
                accept=lambda: chance.randint(0, shape.num_drafts),
                has_state=shape.num_checkpoints is not None,
            )
            for _ in range(shape.dp)
        ]
        self.files = FakeFiles(chance, workers, shape.tp)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=shape.max_num_seqs, max_num_batched_tokens=shape.max_tokens
            ),
            [
                BlockPool(
                    shape.num_blocks,
                    BLOCK_SIZE,
                    prefix_cache=shape.prefix_cache,
                    counts_shared=shape.counts_shared,
                    checkpoints=self.make_checkpoints(),
                    events=CacheEvents(BLOCK_SIZE),
                )
                for _ in range(shape.dp)
            ],
            GraphDispatcher(plan),
            max_model_len=MAX_MODEL_LEN,
            num_drafts=shape.num_drafts,
            tp=shape.tp,
            choose_exchange=self.choose_exchange,
            exact=shape.exact,
            look_ups=self.files.look_ups(has_states=shape.num_checkpoints is not None)
            if shape.has_files
            else None,
        )
        self.subscribers = [Subscriber() for _ in range(shape.dp)]
        self.group = FakeGroup(
            workers,
            shape.tp,
            lose=lambda: shape.loses_tokens and chance.random() < 0.2,
            compile_steps=lambda: chance.choice([*[0] * 20, 1, 4]) if shape.compiles else 0,
        )

    def make_checkpoints(self) -> Checkpoints | None:
        shape = self.shape
        if shape.num_checkpoints is None:
            return None
        return Checkpoints(shape.num_checkpoints if shape.prefix_cache else 0, shape.interval)

    @property
    def choose_exchange(self) -> Callable[[int], ExchangeKind]:
        return exchange_of if self.shape.num_checkpoints is None else exchange_without_loss

    def submit(self, index: int, arrival: Arrival) -> None:
        prompt, params = arrival.prompt(index), arrival.params()
        output, _ = arrival.expected(index)
        output = output[: min(arrival.emitted, len(output) - 1)]
        request = submit(str(index), prompt, params, output=output)
        request.fetch = self.files.fetch if index % 2 else None
        self.scheduler.add(request)
        self.got[str(index)] = output

    def take(self, outputs: Iterable[RequestDelta]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "a finished request goes on"
            self.got[output.request_id] += output.tokens
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def turn(self, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Run one turn: launch the next step if there is one, and give the scheduler the oldest
        result if it is due. Return whether anything ran.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self.results.append(self.group.execute(plan))
            self.check_plan(plan)
        meanwhile()
        is_copying = self.copy()
        if not self.results:
            assert is_copying or not self.scheduler.has_work
            return is_copying
        if plan is None or len(self.results) == self.shape.in_flight:
            self.take(self.scheduler.update(self.results.popleft()))
            self.check_events()
        return True

    def check_events(self) -> None:
        """Check that a subscriber to a rank's events knows the blocks in its prefix cache."""
        for rank, subscriber in zip(self.scheduler.ranks, self.subscribers, strict=True):
            assert rank.pool.events is not None
            if payload := rank.pool.events.take(0.0, rank.index):
                subscriber.apply(payload)
            assert len(subscriber.blocks) == rank.pool.num_cached

    def copy(self) -> bool:
        """Begin and continue copies of blocks; return whether a copy ran or waits."""
        self.files.begin(self.scheduler.copies.take_jobs(is_idle=not self.results))
        was_busy = self.scheduler.copies.is_busy
        was_busy |= self.scheduler.copies.is_looking
        for number, rank, num_whole in self.files.advance():
            self.scheduler.copies.end(number, rank, num_whole)
        return was_busy

    def resume(self, *, keeps_kv: bool) -> None:
        """Simulate that devices have failed during the steps in flight, and that the group has then
        resumed.
        """
        for worker in self.group.workers:
            worker.resume(len(self.results))
        self.results.clear()
        self.files.forget()
        self.scheduler.rewind(self.scheduler.epoch + 1)
        if not keeps_kv:
            for worker in self.group.workers:
                worker.lose_kv()
            self.scheduler.lose_kv()

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name)
        assert (output is None) == (name in self.reasons)
        if output is not None:
            self.take([output])

    def check_plan(self, plan: StepPlan) -> None:
        """Check that workers have the scheduler's rows, and that no two rows write to one block."""
        scheduler, decode_len = self.scheduler, self.shape.num_drafts + 1
        batches = [unpack_ints(batch.scheduled, 4) for batch in plan.batches]
        most = max(int(records[:, 2].sum()) for records in batches)
        shape_is_exact = self.shape.exact
        assert 0 < most <= self.shape.max_tokens
        num_samples = [int((records[:, 3] > 0).sum()) for records in batches]
        kv_len = 0
        if plan.graph is not None:
            kv_len = max(int(records[:, 1:3].sum(1).max(initial=0)) for records in batches)
            assert plan.graph.num_tokens >= most
            assert plan.graph.num_reqs >= max(map(len, batches))
            for records in batches:
                sampled = records[:, 2 : 3 if shape_is_exact else 4]
                assert (sampled == decode_len).all(), "a graph for decoding runs a prompt"
        assert plan.largest == StepSize(most, max(num_samples), kv_len)
        if shape_is_exact:
            self.check_exact_plan(plan)
        num_padded = plan.graph.num_tokens if plan.graph else most
        assert plan.exchange in (self.choose_exchange(num_padded), "all_gather")
        for rank, worker, records in zip(scheduler.ranks, self.group.workers, batches, strict=True):
            scheduled = set(records[:, 0].tolist())
            if self.shape.counts_shared and not self.shape.num_drafts:
                assert counted_blocks(plan, records) <= self.shape.num_blocks
            assert (records[:, 2] > 0).all()
            writable: Counter[int] = Counter()
            for index, request in enumerate(rank.rows.requests):
                if request.is_over:
                    continue
                assert request.dp_rank == rank.index
                assert rank.rows.index_of(request) == index
                rank.rows.settle(index)
                assert rank.rows.received[index] == len(request.tokens)
                if request.row in scheduled:
                    row = worker.rows[request.row]
                    assert row.tokens == list(request.tokens)
                    assert row.blocks == request.block_ids
                first = int(rank.rows.computed[index] - rank.rows.flying[index]) // BLOCK_SIZE
                writable.update(request.block_ids[first:])
                assert not any(rank.pool.hash_of(block) for block in request.block_ids[first:])
            assert not writable or max(writable.values()) == 1
            rows = [request.row for request in rank.running]
            assert len(set(rows)) == len(rows)
            assert {start.row for start in plan.batches[rank.index].started} <= set(rows)
        orders = [request.order for request in scheduler.waiting.queue]
        assert orders == sorted(orders)

    def check_exact_plan(self, plan: StepPlan) -> None:
        """Check that other requests do not change the shape of a request's step.

        A step runs a chunk of one prompt, or one token of each request whose prompt is computed.
        """
        kinds = set()
        for rank, batch in zip(self.scheduler.ranks, plan.batches, strict=True):
            records = unpack_ints(batch.scheduled, 4)
            prompt_of = {request.row: request.prompt_end for request in rank.running}
            for row, computed, length in records[:, :3].tolist():
                left = prompt_of[row] - computed
                kinds.add(left > 0)
                if left > 0:
                    assert len(records) == 1 and computed % self.shape.max_tokens == 0
                    assert length == min(left, self.shape.max_tokens)
                else:
                    assert length == 1
            logits = records[:, 3].tolist()
            assert logits == sorted(logits, reverse=True), "a graph samples its first rows"
        assert len(kinds) == 1
        is_small = max(len(batch.scheduled) for batch in plan.batches) <= 4 * 16
        # If a step was void, it is repeated with all_gather and without a graph.
        if plan.exchange != "all_gather":
            assert (plan.graph is not None) == (kinds == {False} and is_small)

    def check_end(self, arrived: dict[int, Arrival]) -> None:
        """Check that each request ended once with the right tokens, and all blocks are free."""
        assert not self.scheduler.has_work and self.scheduler.num_requests == 0
        assert all(rank.pool.num_used == 0 for rank in self.scheduler.ranks)
        assert self.reasons.keys() == self.got.keys()
        for index, arrival in arrived.items():
            name = str(index)
            tokens, reason = arrival.expected(index)
            if self.reasons[name] == "abort":
                assert self.got[name] == tokens[: len(self.got[name])]
            else:
                assert (self.got[name], self.reasons[name]) == (tokens, reason)


@examples(300)
@given(arrivals, shapes, st.integers(0, 1000), st.sets(st.integers(0, 40), max_size=6))
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    plan_of_arrivals, shape, seed, resumes_at
) -> None:
    play(plan_of_arrivals, shape, seed, resumes_at)


@examples(300)
@given(
    arrivals,
    st.one_of(shapes_with_files, stateful_shapes.map(with_files)),
    st.integers(0, 1000),
    st.sets(st.integers(0, 40), max_size=6),
)
def test_blocks_that_are_read_from_files_have_the_contents_of_their_tokens(
    plan_of_arrivals, shape, seed, resumes_at
) -> None:
    play(plan_of_arrivals, shape, seed, resumes_at)


@examples(300)
@given(arrivals, stateful_shapes, st.integers(0, 1000), st.sets(st.integers(0, 40), max_size=6))
def test_every_token_runs_once_through_the_state_of_its_request(
    plan_of_arrivals, shape, seed, resumes_at
) -> None:
    play(plan_of_arrivals, shape, seed, resumes_at)


@pytest.mark.slow
@examples(300)
@given(arrivals, exact_shapes, st.integers(0, 1000), st.sets(st.integers(0, 40), max_size=6))
def test_shapes_of_steps_depend_on_single_requests_where_tokens_are_replayed(
    plan_of_arrivals, shape, seed, resumes_at
) -> None:
    play(plan_of_arrivals, shape, seed, resumes_at)


def play(plan_of_arrivals: list[Arrival], shape: Shape, seed: int, resumes_at: set[int]) -> None:
    world = World(shape, seed)

    def abort(step: int, in_flight: bool) -> None:
        for index, arrival in enumerate(plan_of_arrivals):
            if arrival.abort_at is None or arrival.in_flight != in_flight:
                continue
            if arrival.at_step + arrival.abort_at == step and str(index) in world.got:
                world.abort(str(index))

    for step in range(3000):
        for index, arrival in enumerate(plan_of_arrivals):
            if arrival.at_step == step:
                world.submit(index, arrival)
        abort(step, in_flight=False)
        if step in resumes_at:
            world.resume(keeps_kv=step % 2 == 0)
        if not world.turn(lambda step=step: abort(step, in_flight=True)) and step > 60:
            break

    world.check_end(dict(enumerate(plan_of_arrivals)))


def test_four_data_parallel_ranks_serve_random_traffic() -> None:
    num_steps = 2000 if is_full() else 600
    shape = Shape(
        dp=4, tp=2, num_drafts=2, max_num_seqs=4, spare_tokens=8, num_blocks=24,
        prefix_cache=True, loses_tokens=True, compiles=True,
    )  # fmt: skip
    world, chance = World(shape, 1), random.Random(2)
    arrived: dict[int, Arrival] = {}

    def abort_one() -> None:
        alive = [name for name in world.got if name not in world.reasons]
        if alive and chance.random() < 0.1:
            world.abort(chance.choice(alive))

    for step in range(num_steps):
        if chance.random() < 0.02:
            world.resume(keeps_kv=chance.random() < 0.5)
        for _ in range(chance.choice([0, 0, 1, 4]) if step % 400 < 300 else 0):
            arrived[len(arrived)] = arrival = Arrival(
                step, chance.randint(0, 16), chance.randint(1, 14), chance.randint(1, 20),
                chance.random() < 0.5, 0, None, False,
            )  # fmt: skip
            world.submit(len(arrived) - 1, arrival)
        world.turn(abort_one)
    while world.turn():
        pass

    world.check_end(arrived)
    stats = world.scheduler.stats()
    assert len(arrived) > num_steps // 4
    assert world.group.num_unmasked > num_steps // 20
    assert stats["preemptions"] > 0 and stats["reruns"] > 0 and stats["cached_tokens"] > 0
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert set(world.reasons.values()) == {"stop", "length", "abort"}
