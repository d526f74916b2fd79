"""Simulated fetches of KV between nodes take time, and have the same limits as real fetches."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dist_aclgraph.actors.wire.block_fetches import LIMIT_S, QUEUE_S
from dist_aclgraph.cli.simulate import render_simulation
from dist_aclgraph.config import Config
from dist_aclgraph.kv.tiers import HOST
from dist_aclgraph.simulate.copy_rates import CopyRates
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.simulate.fetches import SimulatedFetches
from dist_aclgraph.simulate.files import SimulatedNode, SimulatedTier
from dist_aclgraph.simulate.load import Arrival
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import StepTimes
from tests.unit.simulate.deployments import make
from tests.unit.simulate.test_files import AT_ONCE
from tests.unit.simulate.test_group import group

NAMES = [bytes([number]) * 16 for number in range(6)]


def node(*names: bytes, states: tuple[bytes, ...] | None = None) -> SimulatedNode:
    made = SimulatedNode({HOST: SimulatedTier(100)}, has_states=states is not None)
    for name in names:
        made.write(name, 0.0)
    for name in states or ():
        made.write_state(name)
    return made


class World:
    """A node that fetches from another node. The fetch of one block's files takes two seconds."""

    def __init__(self, block_s: float = 2.0, **here: Any) -> None:
        self.now_s = 100.0
        self.here = node(**here)
        self.fetches = SimulatedFetches(self.here, block_s, lambda: self.now_s)

    def end(self) -> float:
        """Let the next fetch end; return the simulated time that has passed, in seconds."""
        before_s, self.now_s = self.now_s, self.fetches.next_end_s
        assert self.fetches.advance(self.now_s)
        return self.now_s - before_s

    def found(self) -> list[bytes]:
        return [name for name in NAMES if self.here.files.has(name)]


def test_leading_blocks_arrive_after_the_time_of_their_bytes() -> None:
    world = World()
    answer = world.fetches.begin(node(*NAMES[:2], NAMES[3]), NAMES, 0)
    assert not world.fetches.advance(world.now_s + 3.9)
    assert answer() is None and world.found() == []
    assert world.end() == 2 * 2.0
    assert answer() is True and world.found() == NAMES[:2] and world.fetches.num_blocks == 2
    assert world.fetches.next_end_s == math.inf


def test_fetches_run_one_after_another_and_do_not_wait_for_long() -> None:
    world = World(block_s=3.0)
    source = node(*NAMES)
    answers = [world.fetches.begin(source, NAMES[i : i + 1], i) for i in range(4)]
    assert [world.end() for _ in range(2)] == [3.0, QUEUE_S - 3.0]
    assert [answer() for answer in answers] == [True, None, True, True], "two would begin too late"
    assert world.end() == 6.0 - QUEUE_S
    assert answers[1]() is True and world.found() == NAMES[:2]


def test_a_fetch_that_takes_too_long_ends_with_fewer_blocks() -> None:
    world = World(block_s=0.4 * LIMIT_S)
    world.fetches.begin(node(*NAMES), NAMES, 0)
    assert world.end() == LIMIT_S
    assert world.found() == NAMES[:2]


def test_blocks_up_to_the_last_state_arrive_with_it() -> None:
    world = World(states=())
    world.fetches.begin(node(*NAMES, states=(NAMES[1], NAMES[3])), NAMES, 0)
    assert world.end() == 4 * 2.0
    assert world.found() == NAMES[:4]
    assert [name for name in NAMES if world.here.has_state(name)] == [NAMES[3]]


def configure(checkpoint: Path, **sections: Any) -> Config:
    kv = {"block_size": 16, "num_blocks": 65, "host_gib": 1.0}
    return make(checkpoint, kv=kv, **sections)


@pytest.mark.parametrize("is_same_node", [True, False])
def test_a_request_waits_as_long_as_its_blocks_are_fetched(
    checkpoint: Path, is_same_node: bool
) -> None:
    config = configure(checkpoint)
    deployment = AssumedDeployment.from_config(config)
    first = SimulatedNode.of(deployment)
    rates = replace(AT_ONCE, network=deployment.bytes_of_files / 0.25)
    prefill = group(config, node=first, rates=rates)
    other = first if is_same_node else SimulatedNode.of(deployment)
    decode = group(config, node=other, rates=rates)
    coming = Arrival(0, 40, 2, 1, 40)
    prefill.submit("0", coming, hands_over=True)
    for _ in prefill.play_until(math.inf, lambda: None):
        pass

    decode.submit("0", coming, output=[7], source=prefill.node)
    for _ in decode.play_until(math.inf, lambda: None):
        pass

    # Two blocks are fetched. The other 8 tokens of the prompt run in one step, which also gives the
    # output.
    assert decode.clock_s == pytest.approx(1.0 if is_same_node else 1.0 + 2 * 0.25)
    assert decode.copies is not None and decode.copies.num_loaded == {HOST: 2}
    assert decode.fetches is not None and decode.fetches.num_blocks == (0 if is_same_node else 2)


def test_groups_on_other_nodes_fetch_the_prompts_of_prefill_groups(checkpoint: Path) -> None:
    parallel = {"dp": 2, "prefill_groups": 1, "prefill_from_tokens": 100}
    config = configure(checkpoint, parallel=parallel, device={"node_npus": 1})
    times = StepTimes(base_s=0.01, token_s=0.0005, capture_s=0.0)
    load = LoadOptions(poisson=10.0, requests=40, prompt_tokens=200, output_tokens=12)

    fast = simulate(config, load, times)
    slow = simulate(config, load, times, rates=CopyRates(network=1e5))

    ours, other = fast["copies"]
    assert other["fetched_share"] == 0.0
    assert ours["fetched_share"] == pytest.approx(ours["loaded_share"][HOST], rel=0.1)
    assert ours["fetched_share"] > 0.3
    assert slow["copies"][0]["fetched_share"] < ours["fetched_share"] / 2
    out = io.StringIO()
    render_simulation(fast, Console(file=out, width=160))
    assert "fetched from other nodes" in out.getvalue()
