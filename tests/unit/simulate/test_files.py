"""In a simulation with copies of KV, the scheduler makes the same decisions as with real workers,
and copies take time.
"""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.cli.simulate import render_simulation
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.look_ups import Files, LookUps
from dist_aclgraph.kv.tiers import DISK, HOST
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.file_upkeep import TOUCH_S
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.routing import block_hashes
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.simulate.copy_rates import CopyRates, copy_rates
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.simulate.files import SimulatedNode, SimulatedTier
from dist_aclgraph.simulate.load import Arrival
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.routing import WITH_COPIES, WITHOUT_COPIES
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import StepTimes
from dist_aclgraph.steps.step import RowSampling
from tests.laws import examples
from tests.unit.scheduler.fake_files import FakeFiles
from tests.unit.scheduler.fake_worker import FakeWorker
from tests.unit.simulate.deployments import make
from tests.unit.simulate.test_group import arrivals, group, play

AT_ONCE = CopyRates(1e30, 1e30)


def configure(checkpoint: Path, num_blocks: int, **sections: Any) -> Config:
    kv = {"block_size": 16, "num_blocks": num_blocks, "host_gib": 1.0, **sections.pop("kv", {})}
    return make(checkpoint, kv=kv, **sections)


class Steady(random.Random):
    """Replaces a random generator, so that ``FakeFiles`` never fails and never delays a copy."""

    def random(self) -> float:
        return 0.99

    def randrange(self, *_: Any) -> int:
        return 0


@settings(examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals, st.integers(1, 6), st.integers(10, 24), st.integers(1, 2))
def test_the_simulation_copies_as_the_scheduler_does_with_a_worker(
    checkpoint: Path, load: Sequence[Arrival], max_num_seqs: int, num_blocks: int, in_flight: int
) -> None:
    config = configure(
        checkpoint,
        num_blocks,
        scheduler={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 32,
            "steps_in_flight": in_flight,
        },
    )
    node = SimulatedNode.of(AssumedDeployment.from_config(config))
    simulated = play(group(config, node=node, rates=AT_ONCE), load)

    dispatcher = GraphDispatcher(simulated.dispatcher.plan)
    worker = FakeWorker(num_blocks, 16)
    files = FakeFiles(Steady(), [worker], 1)
    scheduler = Scheduler(
        config.scheduler,
        [BlockPool(num_blocks, 16)],
        dispatcher,
        max_model_len=2048,
        look_ups=LookUps(Files(files.contents.__contains__)),
    )
    second, touched_s, coming, flying = 0.0, 0.0, list(enumerate(load)), deque()
    while coming or scheduler.has_work or scheduler.copies.is_busy:
        while coming and coming[0][1].arrival_s <= second:
            index, arrival = coming.pop(0)
            prompt, count = arrival.token_ids(index), arrival.output_tokens
            scheduler.add(Request(str(index), prompt, RowSampling(), max_tokens=count))
        step = scheduler.schedule()
        if step is not None:
            flying.append(worker.execute(step.for_rank(0)))
        ended = list(files.advance())
        for number, rank, num_whole in ended:
            scheduler.copies.end(number, rank, num_whole)
        may_touch = second - touched_s >= TOUCH_S
        touched_s = second if may_touch else touched_s
        files.begin(scheduler.copies.take_jobs(is_idle=not flying, may_touch=may_touch))
        assert not list(files.advance()), "the files of jobs that have just begun are moved"
        if step is not None and len(flying) < in_flight:
            continue
        if flying:
            scheduler.update([flying.popleft()])
            second += 1
        elif coming and not (ended or scheduler.copies.is_busy):
            second = coming[0][1].arrival_s

    assert simulated.dispatcher.report() == dispatcher.report()
    assert simulated.scheduler.stats() == scheduler.stats()
    assert simulated.scheduler.copies.counts() == scheduler.copies.counts()


def test_a_request_waits_as_long_as_its_blocks_are_read(checkpoint: Path) -> None:
    config = configure(checkpoint, 6)
    deployment = AssumedDeployment.from_config(config)
    block_bytes = deployment.planner.cache_spec.bytes_per_block
    node, rates = SimulatedNode.of(deployment), CopyRates(host=block_bytes / 0.25)

    simulated = group(config, node=node, rates=rates)
    play(
        simulated, [Arrival(0, 40, 1, 1, 32), Arrival(90, 70, 1, 2, 70), Arrival(180, 40, 1, 1, 32)]
    )

    # The second prompt evicts the blocks of the first one. Steps have 32 tokens, so prompts of 40,
    # 70 and 8 tokens need 2, 3 and 1 steps.
    assert simulated.latencies.first_token_s == [2, 3, 2 * 0.25 + 1]
    assert simulated.copies is not None and simulated.copies.num_loaded == {HOST: 2}
    assert simulated.scheduler.num_cached_tokens == 32


def test_a_block_on_disk_takes_longer_and_returns_to_memory(checkpoint: Path) -> None:
    config = configure(checkpoint, 6, kv={"disk": "/nowhere"})
    deployment = AssumedDeployment.from_config(config)
    block_bytes = deployment.planner.cache_spec.bytes_per_block
    node = SimulatedNode.of(deployment)
    rates = CopyRates(host=block_bytes / 0.25, disk=block_bytes * deployment.files_per_block / 1.5)
    simulated = group(config, node=node, rates=rates)
    shared = Arrival(0, 40, 1, 1, 32)
    play(simulated, [shared, Arrival(90, 70, 1, 2, 70)])
    memory = node.tiers[HOST]
    for block_hash in block_hashes(pack_ints(shared.token_ids(0)), "", 16):
        assert memory.has(block_hash)
        memory.delete(block_hash)

    play(simulated, [shared._replace(arrival_s=180.0)])

    assert simulated.latencies.first_token_s[-1] == 2 * (1.5 + 0.25) + 1
    assert simulated.copies is not None and simulated.copies.num_loaded == {DISK: 2}


def test_a_full_tier_deletes_the_blocks_that_were_not_used_for_the_longest_time() -> None:
    tier, names = SimulatedTier(10), [bytes([number]) * 16 for number in range(12)]
    for number in range(10):
        assert tier.add(names[number], 100.0 + number)
    tier.use(names[0], 200.0)
    assert tier.add(names[10], 201.0)
    assert [n for n in range(11) if not tier.has(names[n])] == [1]
    tier.use(names[2], 202.0)
    assert tier.add(names[11], 203.0)
    assert [n for n in range(12) if not tier.has(names[n])] == [1, 3], "2 was used after all"
    assert not SimulatedTier(0).add(names[0], 0.0)


def shared_load(**fields: Any) -> LoadOptions:
    lengths = {"prompt_tokens": 12, "output_tokens": 12, "beginning_tokens": 128}
    return LoadOptions(**{"poisson": 10.0, "requests": 120, "beginnings": 12, **lengths, **fields})


def test_copies_shorten_the_time_to_the_first_token(checkpoint: Path) -> None:
    """A cache of 32 blocks cannot hold all twelve prefixes of eight blocks each."""
    config = configure(checkpoint, 33)
    times = StepTimes(base_s=0.01, token_s=0.0005, capture_s=0.0)

    report = simulate(config, shared_load(), times)

    ours, other = report["copies"]
    assert [ours["name"], other["name"]] == [WITH_COPIES, WITHOUT_COPIES]
    assert 0 < ours["loaded_share"][HOST] < ours["cached_share"]
    assert other["loaded_share"] == {}
    assert ours["cached_share"] > other["cached_share"] + 0.2
    assert ours["first_token_s"]["mean"] < other["first_token_s"]["mean"]
    out = io.StringIO()
    render_simulation(report, Console(file=out, width=160))
    for words in ("with copies of KV in files", "from host", "GB/s between each NPU and memory"):
        assert words in out.getvalue()


def test_prefill_groups_compute_long_prompts_for_the_other_groups(checkpoint: Path) -> None:
    parallel = {"dp": 2, "prefill_groups": 1, "prefill_from_tokens": 100}
    config = configure(checkpoint, 65, parallel=parallel)
    times = StepTimes(base_s=0.01, token_s=0.0005, capture_s=0.0)

    load = shared_load(beginnings=0, prompt_tokens=200, requests=40)
    ours, other = simulate(config, load, times)["copies"]

    prefill, decode = ours["groups"]
    assert 0 < prefill["requests"] < 40 and prefill["requests"] + decode["requests"] == 40
    assert ours["loaded_share"][HOST] > 0.3, "the other group reads the prompts"
    assert sum(group["requests"] for group in other["groups"]) == 40


def test_without_copies_none_are_compared(checkpoint: Path) -> None:
    options = LoadOptions(poisson=20.0, requests=10, prompt_tokens=20, output_tokens=10)
    assert simulate(make(checkpoint), options, StepTimes())["copies"] is None


def test_rates_are_positive() -> None:
    assert copy_rates(3.0, 2.0) == CopyRates(3e9, 2e9)
    with pytest.raises(ConfigError, match=r"--disk-gbs is 0; it must be positive"):
        copy_rates(1.0, 0.0)
