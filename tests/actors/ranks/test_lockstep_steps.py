"""Real ranks that share experts and contexts run thousands of random steps. No step hangs, no
request is lost, and all ranks run the same number of collectives.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.step import StepPlan
from tests import laws
from tests.checkpoints import add_next_token_module, make_prompts, make_reference
from tests.lockstep import Lockstep, lockstep
from tests.slow import slow
from tests.unit.scheduler.requests import submit

DRAFTS, BLOCK_SIZE, MAX_LEN = 1, 16, 96
EXPERTS = {"dp": 4, "ep": 4}
CONTEXTS = {"tp": 2, "pcp": 2, "dcp": 4, "cp_interleave": 4, "dp": 2, "ep": 8}
NUM_STEPS = laws.count(2500)
PROMPTS = make_prompts((1, 3, 10, 16, 17, 30, 45, 60))


@pytest.fixture(scope="module", params=[EXPERTS, slow(CONTEXTS)], ids=["experts", "contexts"])
def config(
    npu: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    # The cache has only half of the blocks that all requests together need, so some requests are
    # preempted.
    num_blocks, mixed = (14, (16, 32)) if request.param is EXPERTS else (5, (4, 16))
    directory = tmp_path_factory.mktemp("deepseek")
    make_reference("DeepseekV3ForCausalLM", directory, num_hidden_layers=2)
    add_next_token_module(directory)
    return make_config(
        {
            "model": str(directory),
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            # The experts' capacity is so small that some steps exceed it and are run again.
            "parallel": {**request.param, "exchange": "all_to_all", "expert_capacity": 1.0},
            "speculative": {"num_tokens": DRAFTS},
            "graph": {
                "mode": "FULL_AND_PIECEWISE",
                "sizes": (2, 4, 8),
                "mixed_sizes": mixed,
                "lazy": "off",
            },
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 32},
            "kv": {"block_size": BLOCK_SIZE, "num_blocks": num_blocks},
            "device": {"kind": "emulated", "emulator": {"strict": False}},
        }
    )


@pytest.fixture
def group(config: Config) -> Iterator[Lockstep]:
    with lockstep(config) as started:
        yield started


def test_random_arrivals_and_aborts(group: Lockstep) -> None:
    rng, num_wanted = random.Random(0), NUM_STEPS
    scheduler, graphs = group.scheduler, group.scheduler.dispatcher.plan.capture_order
    prompts: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    live: set[str] = set()
    ended: Counter[str] = Counter()
    shapes: set[BatchDescriptor | None] = set()
    idle_steps = 0
    collectives: dict[BatchDescriptor, set[int]] = {}

    def run(plan: StepPlan) -> None:
        done = group.ranks.step(plan)
        found = [step.num_collectives for step in done]
        counts, num_ranks = set(found), len(found) // len(plan.batches)
        is_full = plan.graph is not None and plan.graph.mode == "FULL"
        # Some collectives let ranks share caches and prompts. These collectives run only among
        # ranks with the same batch.
        by_batch = [
            set(found[first : first + num_ranks]) for first in range(0, len(found), num_ranks)
        ]
        together = by_batch if group.shares_contexts and not is_full else [counts]
        assert all(len(each) == 1 for each in together), f"step {plan.step}: {found}"
        assert {(step.result.epoch, step.result.step) for step in done} == {(plan.epoch, plan.step)}
        if plan.graph is not None and is_full:
            collectives.setdefault(plan.graph, set()).update(counts)
        for output in scheduler.update([step.result for step in done]):
            tokens[output.request_id] += output.tokens
            if output.finish_reason is not None:
                live.discard(output.request_id)
                ended[output.request_id] += 1

    num_steps = 0
    while num_steps < num_wanted or scheduler.has_work:
        if num_steps < num_wanted and rng.random() < (0.25 if num_steps // 200 % 2 else 0.05):
            name = str(len(prompts))
            prompts[name] = rng.randrange(len(PROMPTS))
            params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0.0, ignore_eos=True)
            scheduler.add(submit(name, PROMPTS[prompts[name]], params))
            tokens[name] = []
            live.add(name)
        if live and rng.random() < 0.02:
            name = rng.choice(sorted(live))
            assert scheduler.abort(name) is not None
            live.discard(name)
            ended[name] += 1
        plan = scheduler.schedule()
        num_steps += 1
        if plan is None:
            continue
        shapes.add(plan.graph)
        idle_steps += any(not batch.scheduled for batch in plan.batches)
        run(plan)

    assert set(ended) == set(prompts)
    assert set(ended.values()) == {1}
    assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)
    assert len(graphs) == 5
    assert shapes == {*graphs, None}, "all graphs and eager steps"
    assert idle_steps > 0
    # If ranks share prompts, each rank runs fewer tokens, so the experts' capacity suffices.
    assert scheduler.num_reruns > 0 or group.shares_contexts
    # The number of a graph's collectives does not depend on its batch.
    assert all(len(counts) == 1 for counts in collectives.values())
    # A request gets the same output tokens in any batch.
    for index in range(len(PROMPTS)):
        answers = sorted((tokens[name] for name in prompts if prompts[name] == index), key=len)
        for answer in answers:
            assert answer == answers[-1][: len(answer)]
