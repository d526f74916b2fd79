"""One lockstep group without Ray: its ranks are processes, and the test is its engine.

Workers, HCCL, graphs and the scheduler are those of a deployment; placement, channels and clients
are not there, which other tests hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dist_aclgraph.config import Config
from dist_aclgraph.ints import unpack_ints
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.scheduler.scheduler import Scheduler
from tests.actors.rank_processes import rank_processes
from tests.deployments import greedy_params
from tests.unit.scheduler.requests import submit


@dataclass(frozen=True)
class Generated:
    """What a group answered.

    Attributes:
        tokens: of each prompt.
        num_replayed: steps that replayed a graph.
        misses: reasons of the steps that did not.
    """

    tokens: list[list[int]]
    num_replayed: int
    misses: set[str]


def generate(config: Config, prompts: Sequence[list[int]], num_tokens: int) -> Generated:
    """Start the group, answer all prompts at once, greedily, and end it.

    Args:
        config: its ranks are one lockstep group; every graph that it asks for is captured.
    """
    planner = Planner.from_config(config)
    plan = GraphPlan(
        version=1,
        mode=planner.config.graph.mode,
        families=planner.families,
        max_num_seqs=config.scheduler.max_num_seqs,
        budget_model=config.graph.budget_model,
    )
    num_blocks = config.kv.num_blocks
    assert num_blocks is not None
    rule = ExchangeRule.from_config(config, planner.facts, config.device.emulator.soc)
    scheduler = Scheduler(
        config.scheduler,
        [BlockPool(num_blocks, config.kv.block_size) for _ in range(config.parallel.dp)],
        GraphDispatcher(plan),
        max_model_len=planner.max_model_len,
        num_drafts=config.speculative.num_tokens,
        tp=config.parallel.tp,
        choose_exchange=rule.choose,
    )
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    kinds: Counter[bool] = Counter()
    with rank_processes(planner.config, plan, num_blocks, planner.max_model_len) as ranks:
        for name, prompt in zip(tokens, prompts, strict=True):
            scheduler.add(submit(name, prompt, greedy_params(num_tokens)))
        while scheduler.has_work:
            step = scheduler.schedule()
            assert step is not None
            kinds[step.graph is not None] += 1
            for output in scheduler.update([done.result for done in ranks.step(step)]):
                tokens[output.request_id] += unpack_ints(output.token_ids).tolist()
    return Generated(list(tokens.values()), kinds[True], set(scheduler.dispatcher.misses))
