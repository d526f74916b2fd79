"""The states of one lockstep group, and the facts that clients get about this group."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_aclgraph.actors.controller.group_state import GROUP_TRANSITIONS, GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.config import load_config
from dist_aclgraph.kv.tiers import CachePlace
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.way_back import SOUND_S
from tests.serve.conftest import CONFIG

NO_WORKERS: Any = None


def make_group(**keys: Any) -> LockstepGroup:
    planner = Planner.from_config(load_config(CONFIG, keys))
    address = Address("node", Endpoint("ipc:///nowhere"))
    return LockstepGroup(NO_WORKERS, planner, num_blocks=50, opened_at=address)


def test_each_group_tells_its_own_block_size() -> None:
    small, large = (make_group(**{"kv.block_size": size}) for size in (64, 128))

    assert (small.entry.tokens_per_block, large.entry.tokens_per_block) == (64, 128)
    assert small.entry.cache_blocks == large.entry.cache_blocks == 50


def test_only_a_prefill_group_tells_where_its_blocks_are() -> None:
    group = make_group()
    group.blocks_at = BlockSource((group.address,), "model", CachePlace(), ())
    assert group.entry.blocks is None
    group.prefills = True
    assert group.entry.blocks == group.blocks_at


class Workers:
    """Fake workers. They count how often the group kills them."""

    def __init__(self) -> None:
        self.killed = 0

    def kill(self) -> None:
        self.killed += 1


@pytest.mark.parametrize(
    "way",
    [
        (GroupState.SERVING, GroupState.DRAINING, GroupState.LOST, GroupState.ABANDONED),
        (GroupState.SERVING, GroupState.LOST, GroupState.DETACHED, GroupState.ABANDONED),
    ],
)
def test_the_life_of_a_group_is_allowed(way: tuple[GroupState, ...]) -> None:
    group = make_group()

    assert all(map(group.enter, way))
    assert group.state is GroupState.ABANDONED


def test_a_group_never_leaves_the_table() -> None:
    for state, to in itertools.product(GroupState, repeat=2):
        group = make_group()
        group.state = state

        assert group.enter(to) == (to in GROUP_TRANSITIONS[state])
        assert group.state is (to if to in GROUP_TRANSITIONS[state] else state)


def test_a_group_that_is_lost_meanwhile_does_not_drain() -> None:
    group = make_group()
    group.enter(GroupState.SERVING)
    group.enter(GroupState.LOST)

    assert not group.enter(GroupState.DRAINING)
    assert group.is_lost
    assert not group.entry.is_draining


def test_the_workers_of_a_lost_group_are_killed_once() -> None:
    group, workers = make_group(), Workers()
    group.workers = workers  # type: ignore[assignment]
    group.give_up()
    assert workers.killed == 0  # the group is not lost yet

    group.state = GroupState.DETACHED
    group.give_up()
    group.give_up()

    assert workers.killed == 1
    assert group.way_back() == "REBUILD"


@pytest.mark.parametrize(
    ("is_rejoined", "served_s", "way"),
    [
        (False, 0.5 * SOUND_S, "REJOIN"),
        (True, 0.5 * SOUND_S, "REBUILD"),
        (True, 2 * SOUND_S, "REJOIN"),
    ],
)
def test_survivors_whose_next_group_is_lost_soon_make_no_other(
    is_rejoined: bool, served_s: float, way: str
) -> None:
    group = make_group()
    group.workers = cast(WorkerGroup, SimpleNamespace(ranks=(0, 1)))
    group.is_rejoined, group.opened_s, group.lost_s = is_rejoined, 10.0, 10.0 + served_s

    assert group.way_back() == way
