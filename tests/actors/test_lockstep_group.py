"""What clients are told of a group: its own facts, whatever others run."""

from __future__ import annotations

from typing import Any

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.config import load_config
from dist_aclgraph.planning.planner import Planner
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
