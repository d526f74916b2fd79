"""The simulated loop gives the counts that were computed by hand, and decides as the real scheduler
does.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import Config
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.simulate.group import SimulatedGroup
from dist_aclgraph.simulate.load import Arrival, Batch
from dist_aclgraph.simulate.times import StepTimes
from dist_aclgraph.steps.step import RankBatch, RowSampling
from tests.laws import examples
from tests.plans import decode_graph
from tests.unit.scheduler.fake_worker import FakeWorker
from tests.unit.simulate.deployments import SHAPE, make

ONE_SECOND = StepTimes(base_s=1.0, token_s=0.0, capture_s=0.0)


def group(config: Config, times: StepTimes = ONE_SECOND, **fields: Any) -> SimulatedGroup:
    deployment = AssumedDeployment.from_config(config)
    assert config.kv.num_blocks is not None
    negotiated = deployment.planner.negotiate(deployment.offers)
    return SimulatedGroup(deployment, negotiated, config.kv.num_blocks, times, **fields)


def play(simulated: SimulatedGroup, load: Sequence[Batch | Arrival]) -> SimulatedGroup:
    if load and isinstance(load[0], Batch):
        simulated.play_batches(iter(load), math.inf, lambda: None)  # type: ignore[arg-type]
    else:
        simulated.play_requests(iter(load), lambda: None)  # type: ignore[arg-type]
    return simulated


def decode(*sizes: int) -> list[Batch]:
    return [Batch(size, size, 1) for size in sizes]


def test_a_trace_of_batches_counts_as_by_hand(checkpoint: Path) -> None:
    times = StepTimes(base_s=1.0, token_s=0.5)
    found = play(
        group(make(checkpoint), times), [*decode(1, 3, 3, 8), Batch(6, 2, 3), Batch(7, 1, 0)]
    )

    shares = found.tally.all
    assert found.dispatcher.report()["replays"] == {
        "full decode 1": 1, "full decode 4": 2, "full decode 8": 1
    }  # fmt: skip
    assert found.dispatcher.misses == {"prefill": 1, "mixed": 1}
    assert (shares.steps, shares.eager_steps) == (6, 2)
    assert (shares.live_tokens, shares.eager_tokens, shares.padded_tokens) == (28, 13, 2)
    assert shares.padding_share == 2 / 17
    # In six steps, 1 + 4 + 4 + 8 = 17 tokens are replayed, and 13 tokens run eagerly.
    assert found.clock_s == 6 * 1.0 + 0.5 * (17 + 13)


def test_requests_count_as_by_hand(checkpoint: Path) -> None:
    # Two prompts run in one step, followed by two decode steps. Later a prompt of 40 tokens runs in
    # two chunks.
    found = play(group(make(checkpoint)), [Arrival(0, 5, 3), Arrival(0, 6, 3), Arrival(90, 40, 2)])

    assert found.dispatcher.misses == {"mixed": 1, "prefill": 2}
    assert found.dispatcher.report()["replays"] == {"full decode 1": 1, "full decode 2": 2}
    assert [step["tokens"] for step in found.tally.by_tokens()] == [1, 2, 8, 11, 32]
    assert found.counts.finished == 3
    assert found.counts.generated_tokens == 3 + 3 + 2
    assert found.clock_s == 90 + 3
    assert [shares["from_s"] for shares in found.tally.over_time.report()] == [0, 1, 2, 90, 91, 92]


def test_requests_that_the_scheduler_refuses_are_counted(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 32, "max_waiting": 2},
    )

    found = play(group(config), [Arrival(0, 5000, 1), *[Arrival(0, 4, 2)] * 5])

    assert found.counts.refused == {"RequestTooLongError": 1, "QueueFullError": 2}
    assert found.counts.finished == 3
    assert found.counts.most_waiting == 3  # one of these three gets a row in the next step


def test_a_cache_that_is_too_small_preempts(checkpoint: Path) -> None:
    config = make(checkpoint, kv={"block_size": 16, "num_blocks": 5})

    found = play(group(config), [Arrival(0, 15, 40), Arrival(0, 15, 40)])

    assert found.counts.finished == 2
    assert found.scheduler.num_preemptions == 1


prompts = st.tuples(st.integers(0, 60), st.sampled_from([0, 16, 40])).filter(any)
arrivals = st.lists(
    st.builds(
        lambda second, prompt, output_tokens, shared: Arrival(
            float(second), sum(prompt), output_tokens, shared, prompt[1]
        ),
        st.integers(0, 30),
        prompts,
        st.integers(1, 30),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=14,
).map(sorted)


class DrawnDrafts:
    """Lets a ``FakeWorker`` accept as many drafts as a simulated group would accept."""

    def __init__(self, num_drafts: int, accepted: float) -> None:
        self._num_drafts, self._accepted = num_drafts, accepted
        self._random = np.random.default_rng(0)
        self._next: deque[int] = deque()

    def draw(self, batch: RankBatch) -> None:
        """Draw, for each request of a step, the number of accepted drafts."""
        logits = [n for *_, n in unpack_ints(batch.scheduled, 4).tolist() if n]
        if self._num_drafts:
            is_right = self._random.random((len(logits), self._num_drafts)) < self._accepted
            right = np.cumprod(is_right, axis=1).sum(axis=1).tolist()
            self._next.extend(count for count, n in zip(right, logits, strict=True) if n > 1)

    def next(self) -> int:
        """Return the drawn number of accepted drafts for the step's next request."""
        return self._next.popleft()


@settings(examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals,
    st.integers(1, 8),
    st.integers(8, 64),
    st.integers(10, 40),  # blocks of 16 tokens; a request has at most 130 tokens, and drafts
    st.integers(1, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_simulation_decides_as_the_scheduler_does_with_a_worker(
    checkpoint: Path,
    load,
    max_num_seqs: int,
    max_tokens: int,
    num_blocks: int,
    in_flight: int,
    num_drafts: int,
    accepted: float,
) -> None:
    shape = {**SHAPE, "num_nextn_predict_layers": 1}
    (checkpoint / "config.json").write_text(json.dumps(shape))
    config = make(
        checkpoint,
        scheduler={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_tokens, max_num_seqs * (num_drafts + 1)),
            "steps_in_flight": in_flight,
        },
        kv={"block_size": 16, "num_blocks": num_blocks},
        speculative={"num_tokens": num_drafts},
        graph={"mode": "FULL_AND_PIECEWISE"},
    )
    simulated = play(group(config, accepted=accepted), load)

    plan = simulated.dispatcher.plan
    dispatcher = GraphDispatcher(plan)
    scheduler = Scheduler(
        config.scheduler,
        [BlockPool(num_blocks, 16, prefix_cache=config.shares_prefixes)],
        dispatcher,
        max_model_len=2048,
        num_drafts=num_drafts,
    )
    drafts = DrawnDrafts(num_drafts, accepted)
    worker = FakeWorker(num_blocks, 16, num_drafts=num_drafts, accept=drafts.next)
    second, coming, flying = 0, list(enumerate(load)), deque()
    while coming or scheduler.has_work:
        while coming and coming[0][1].arrival_s <= second:
            index, arrival = coming.pop(0)
            prompt = arrival.token_ids(index)
            scheduler.add(
                Request(str(index), prompt, RowSampling(), max_tokens=arrival.output_tokens)
            )
        step = scheduler.schedule()
        if step is not None:
            drafts.draw(step.batches[0])
            flying.append(worker.execute(step.for_rank(0)))
            if len(flying) < in_flight:
                continue
        if flying:
            scheduler.update([flying.popleft()])
        second += 1

    assert simulated.dispatcher.report() == dispatcher.report()
    assert simulated.scheduler.num_preemptions == scheduler.num_preemptions
    assert simulated.scheduler.stats() == scheduler.stats()
    # The counts of the simulation's tally equal those of the real dispatcher.
    shares, counters = simulated.tally.all, dispatcher.report()
    assert shares.eager_steps == sum(counters["misses"].values())
    assert shares.padded_tokens == counters["padded_tokens"]
    assert shares.live_tokens - shares.eager_tokens == counters["live_tokens"]


@pytest.mark.parametrize(("in_flight", "first_s"), [(1, 2), (2, 3)])
def test_a_request_that_arrives_in_a_step_waits_for_the_steps_in_flight(
    checkpoint: Path, in_flight: int, first_s: int
) -> None:
    simulated = group(make(checkpoint, scheduler={"steps_in_flight": in_flight}))
    simulated.submit("0", Arrival(0, 5, 4))
    first, begun = simulated.play_until(0.5, lambda: None), {}

    next(first)
    assert list(first) == []
    simulated.submit("1", Arrival(0.5, 5, 1))
    for outputs in simulated.play_until(math.inf, lambda: None):
        for index in outputs.firsts.tolist():
            begun[outputs.requests[index].request_id] = simulated.clock_s

    assert begun == {"1": first_s}
    assert simulated.clock_s == 4


def test_latencies_are_those_of_the_simulated_clock(checkpoint: Path) -> None:
    config = make(checkpoint, scheduler={"max_num_seqs": 1, "steps_in_flight": 1})

    found = play(group(config), [Arrival(0, 5, 4), Arrival(0.5, 5, 1), Arrival(90, 5, 3)])

    # A prompt needs one step, and each further token needs one step. The second request waits for
    # the first request.
    assert found.latencies.first_token_s == [1, 4 + 1 - 0.5, 1]
    assert found.latencies.per_token_s == [1, 1]


def test_a_request_that_was_preempted_has_one_first_token(checkpoint: Path) -> None:
    config = make(checkpoint, kv={"block_size": 16, "num_blocks": 5})

    found = play(group(config), [Arrival(0, 15, 40), Arrival(0, 15, 40)])

    assert found.scheduler.num_preemptions == 1
    assert len(found.latencies.first_token_s) == len(found.latencies.per_token_s) == 2


def test_prompts_take_the_time_of_the_largest_share_of_a_rank(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        parallel={"tp": 2, "pcp": 2, "dp": 2},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 64},
    )

    found = play(group(config, StepTimes(base_s=1.0, token_s=0.5)), [Arrival(0, 40, 2)])

    # Each of two ranks runs 20 of the 40 prompt tokens. In the decode step, both ranks run the same
    # token of the request.
    assert [step["tokens"] for step in found.tally.by_tokens()] == [1, 20]
    assert found.counts.generated_tokens == 2
    assert found.clock_s == 2 * 1.0 + 0.5 * (20 + 1)


def test_shards_of_a_cache_hold_longer_requests(checkpoint: Path) -> None:
    load = [Arrival(0, 1500, 2)]
    whole, sharded = (
        play(group(make(checkpoint, parallel={"tp": 4, "dcp": dcp})), load) for dcp in (1, 2)
    )

    # 64 blocks of 16 tokens hold 1024 tokens. With two shards, each block holds 32 tokens, so 64
    # blocks hold 2048.
    assert whole.counts.refused == {"RequestTooLongError": 1}
    assert sharded.counts.finished == 1


def test_a_plan_follows_its_traffic_while_it_is_simulated(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        # Each decode graph needs one stream id, so the ranks can afford four graphs.
        device={"emulator": {"streams": 34 + 4}},
        graph={"rebucket_s": 100.0},
    )
    simulated = group(config)
    first = simulated.dispatcher.plan.families[0].buckets

    play(simulated, decode(*[17] * 2000))

    assert len(first) == 4 and 24 not in first
    assert 24 in simulated.dispatcher.plan.families[0].buckets
    assert [version["version"] for version in simulated.versions] == [1, 2]
    assert simulated.counts.plan_changes == 1
    new = set(simulated.dispatcher.plan.families[0].buckets) - set(first)
    assert simulated.counts.plan_captures == simulated.ranks.captures == len(new)
    # The plan changes only after 256 observed steps, and further steps run between the captures.
    assert 300 < simulated.versions[1]["at_s"] < 400
    assert simulated.tally.over_time.report()[-1]["padding_share"] == 7 / 24
    assert simulated.most_streams == {"full decode": 4, "fixed": 0, "all": 4}


def test_groups_that_share_a_plan_have_seen_enough_the_sooner(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        device={"emulator": {"streams": 34 + 4}},
        graph={"rebucket_s": 100.0},
    )

    simulated = play(group(config, shares_plan_with=3), decode(*[17] * 1000))

    assert 100 < simulated.versions[1]["at_s"] < 200


def test_lazy_graphs_come_and_go_and_take_time(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        graph={"sizes": [64], "lazy": "decode", "lazy_capacity": 1, "lazy_min_tokens": 100},
    )
    simulated = group(config, StepTimes(base_s=1.0, token_s=0.0, capture_s=1000.0))

    play(simulated, decode(*[8] * 100, *[16] * 100))

    assert simulated.counts.lazy_captures == 2
    assert simulated.counts.lazy_evictions == 1
    assert simulated.counts.plan_captures == 0
    assert simulated.dispatcher.replays.keys() == {
        graph for graph in simulated.dispatcher.replays if graph.num_tokens in (8, 16, 64)
    }
    assert simulated.clock_s == 200 + 2 * 1000.0
    # There are never more than two graphs: the plan's graph, and one other graph.
    assert simulated.most_streams["all"] == 2


def test_a_group_without_requests_changes_its_graphs_while_it_waits(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        kv={"block_size": 16, "num_blocks": 1000},
        device={"emulator": {"streams": 34 + 4}},
        graph={"rebucket_s": 300.0, "rebucket_min_steps": 1},
    )
    simulated = group(config)

    # The first requests end within 200 seconds. The next request arrives only after the buckets
    # were chosen again.
    load = [Arrival(0, 1, 200)] * 17 + [Arrival(10_000, 1, 2)]
    play(simulated, load)

    assert [version["version"] for version in simulated.versions] == [1, 2]
    assert 300 <= simulated.versions[1]["at_s"] < 301


def test_a_simulation_imports_neither_torch_nor_ray(checkpoint: Path) -> None:
    (checkpoint / "x.yaml").write_text(f"model: {checkpoint}\n")
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from dist_aclgraph.cli.main import cli\n"
        f"arguments = ['simulate', {str(checkpoint / 'x.yaml')!r}, '--poisson', '9', "
        f"'--requests', '20', '--compare', '--plot', {str(checkpoint / 'x.png')!r}]\n"
        "result = CliRunner().invoke(cli, arguments)\n"
        "assert result.exit_code == 0, result.output\n"
        "print([n for n in ('torch', 'ray', 'torch_npu', 'transformers') if n in sys.modules])"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip().endswith("[]")


@pytest.mark.parametrize("width", [1, 7, 300])
def test_a_time_line_stays_small_and_loses_nothing(width: int) -> None:
    from dist_aclgraph.simulate.tally import MAX_BINS, TimeLine

    line = TimeLine()
    for second in range(0, 3000 * width, width):
        line.add(second, 2, None)

    found = line.report()
    assert len(found) <= MAX_BINS
    assert sum(shares["steps"] for shares in found) == 3000
    starts = [shares["from_s"] for shares in found]
    assert starts == sorted(starts) and starts[-1] + line.width_s > 2999 * width


def test_ranks_that_share_experts_are_simulated_in_one_group(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    shape = {**SHAPE, **experts, "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    load = [Arrival(0.0, 5, 3) for _ in range(8)]

    found = play(group(make(tmp_path, parallel={"dp": 4, "ep": 4})), load)

    assert found.counts.finished == 8
    assert found.counts.generated_tokens == 24
    assert found.dispatcher.step == 3
    assert found.dispatcher.replays == {decode_graph(2): 2}


def test_groups_that_share_a_plan_have_seen_each_others_mixed_batches_too(
    checkpoint: Path,
) -> None:
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        device={"emulator": {"streams": 34 + 4}},
        graph={"rebucket_s": 100.0},
    )
    load = [*decode(17), Batch(17, 2, 0)] * 500

    simulated = play(group(config, shares_plan_with=3), load)

    assert 100 < simulated.versions[1]["at_s"] < 200  # simulated seconds
