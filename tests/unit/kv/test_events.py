"""A subscriber that applies the events of a prefix cache knows exactly which blocks are in the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool, hash_block, salted_root
from dist_aclgraph.kv.events import CacheEvents, Encoding, block_name
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.routing import block_hashes
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.kv_subscriber import Subscriber
from tests.plans import make_plan
from tests.unit.scheduler.fake_worker import FakeGroup, FakeWorker
from tests.unit.scheduler.requests import submit

BLOCK, NUM_BLOCKS = 4, 9
ENCODINGS: tuple[Encoding, ...] = ("array", "map")


class EventsMachine(RuleBasedStateMachine):
    """A pool of blocks whose events reach a subscriber at random times."""

    encoding: Encoding = "array"

    def __init__(self) -> None:
        super().__init__()
        self.events = CacheEvents(BLOCK, self.encoding)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, events=self.events)
        self.subscriber = Subscriber(self.encoding)
        self.holders: list[list[int]] = []
        self.reported: dict[bytes, tuple[bytes, list[int]]] = {}
        self.private: set[bytes] = set()

    @rule(count=st.integers(1, 4), first=st.integers(0, 2), salt=st.sampled_from(["", "", "s"]))
    def store_prefix(self, count: int, first: int, salt: str) -> None:
        if count > self.pool.num_free:
            return
        self.holders.append(self.pool.allocate(count))
        parent = salted_root(salt)
        for index, block_id in enumerate(self.holders[-1]):
            tokens = [first + index] * BLOCK
            name = hash_block(parent, pack_ints(tokens))
            is_new = self.pool.store(block_id, name)
            if salt:
                self.private.add(name)
            elif is_new:
                self.events.stored(name, parent, tokens)
            self.reported.setdefault(name, (parent, tokens))
            parent = name

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.holders.pop(data.draw(st.sampled_from(range(len(self.holders))))))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        self.pool.condemn(data.draw(st.sampled_from(self.holders)))

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.holders.clear()

    @rule()
    def deliver(self) -> None:
        payload = self.events.take(1.5, 3)
        if payload:
            self.subscriber.apply(payload)
            assert self.subscriber.rank == 3
        assert self.events.take(1.5, 3) == b""
        findable = {
            block_name(name): (block_name(parent) if parent else None, tuple(tokens))
            for name, (parent, tokens) in self.reported.items()
            if name not in self.private and self.pool.match([name])
        }
        assert self.subscriber.blocks == findable

    @invariant()
    def the_first_event_clears(self) -> None:
        assert self.subscriber.seen[:1] in ([], ["AllBlocksCleared"])


class MapEventsMachine(EventsMachine):
    encoding: Encoding = "map"


TestEvents = EventsMachine.TestCase
TestMapEvents = MapEventsMachine.TestCase


def stored_prefix(*blocks: list[int]) -> tuple[list[bytes], CacheEvents]:
    events, hashes = CacheEvents(BLOCK), [b""]
    for tokens in blocks:
        hashes.append(hash_block(hashes[-1], pack_ints(tokens)))
        events.stored(hashes[-1], hashes[-2], tokens)
    return hashes[1:], events


def test_blocks_of_one_prefix_share_an_event_and_so_do_evictions() -> None:
    hashes, events = stored_prefix([1] * BLOCK, [2] * BLOCK)
    for block_hash in reversed(hashes):
        events.removed(block_hash)

    _, found, rank = msgspec.msgpack.decode(events.take(0.0, 0))

    names = [block_name(block_hash) for block_hash in hashes]
    assert found == [
        ["BlockStored", names, None, [1] * BLOCK + [2] * BLOCK, BLOCK, None, "GPU", None],
        ["BlockRemoved", names[::-1], "GPU"],
    ]
    assert rank == 0


def test_a_later_block_names_its_parent() -> None:
    (first,), events = stored_prefix([1] * BLOCK)
    events.take(0.0, 0)
    events.stored(hash_block(first, b""), first, [2] * BLOCK)

    _, ((_, _, parent, *_),), _ = msgspec.msgpack.decode(events.take(0.0, 0))

    assert parent == block_name(first) == int.from_bytes(first[8:], "big")


def test_a_cleared_cache_forgets_the_events_that_nobody_has_seen() -> None:
    _, events = stored_prefix([1] * BLOCK)
    events.cleared()

    assert msgspec.msgpack.decode(events.take(0.0, 0))[1] == [["AllBlocksCleared"]]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(requests=st.lists(st.tuples(prompts, st.sampled_from(["", "", "salt"])), max_size=12))
def test_a_schedulers_events_are_its_pools_blocks_without_those_of_salts(
    encoding: Encoding, requests: Sequence[tuple[list[int], str]]
) -> None:
    events = CacheEvents(BLOCK, encoding)
    pool = BlockPool(NUM_BLOCKS, BLOCK, events=events)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16),
        [pool],
        GraphDispatcher(make_plan(1, 2)),
        max_model_len=32,
    )
    worker, subscriber = FakeGroup([FakeWorker(NUM_BLOCKS, BLOCK)]), Subscriber(encoding)
    for index, (prompt, salt) in enumerate(requests):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        scheduler.add(submit(str(index), prompt, params, cache_salt=salt))
    known = list(scheduler.waiting.queue)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(worker.execute(plan))
        if payload := events.take(0.0, 0):
            subscriber.apply(payload)
        open_hashes = {name for each in known if not each.cache_root for name in each.hashes}
        findable = {block_name(name) for name in open_hashes if pool.match([name])}
        assert subscriber.blocks.keys() == findable
        for request in (each for each in known if not each.cache_root):
            tokens = list(request.tokens)
            hashes = block_hashes(pack_ints([*tokens, 0]), "", BLOCK)
            assert subscriber.longest_prefix(tokens, BLOCK) == len(pool.match(hashes))
