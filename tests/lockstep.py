"""One lockstep group without Ray: its ranks are forked processes, and the test is its engine.

Workers, HCCL, negotiation, capture, scheduler and the phases of the start are real. Placement,
channels and clients are missing; other tests cover them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.controller.startup import Startup
from dist_aclgraph.actors.engine import engine_report
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.worker.node_files import NodeFilesSettings
from dist_aclgraph.config import Config
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import make_checkpoints
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import LookUps, look_ups_of
from dist_aclgraph.kv.tiers import CachePlace, KVTiers
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.steps.step import StepPlan
from dist_aclgraph.topology import Ranks
from tests.actors.rank_processes import RankProcesses, RankStep, rank_processes, rendezvous
from tests.deployments import Answer
from tests.unit.scheduler.requests import submit

TOKEN = "secret"  # token of the deployment to which the group belongs


class ForkedStartup(Startup):
    """The phases of a deployment's start, for ranks whose processes already exist."""

    def __init__(self, planner: Planner, group: LockstepGroup, meeting: str) -> None:
        super().__init__(
            planner,
            [group],
            ProcessStarter(),
            StartLimit(),
            lambda phase: None,
            lambda *progress: None,
        )
        self._meeting = meeting

    def _start_command(self) -> str | None:
        return None  # because Ray starts no process here

    def _place(self, ranks: Sequence[Ranks], deployment: str) -> None:
        pass

    def _find_out(self) -> None:
        pass

    def _join(self, group: LockstepGroup) -> None:
        assert isinstance(group.workers, RankProcesses)
        group.devices = group.workers.join(self._meeting, self._config.timeouts.join_s)


class Lockstep:
    """A started group. It has captured its graphs, and can answer requests.

    Attributes:
        scheduler: the group's scheduler, which in a deployment is part of the engine.
        ranks: the processes that run the steps.
        servers: addresses of the file servers on nodes without the engine; see
            ``GroupFiles.servers``.
    """

    def __init__(
        self,
        planner: Planner,
        group: LockstepGroup,
        ranks: RankProcesses,
        files: GroupFiles | None = None,
        servers: tuple[Address, ...] = (),
    ) -> None:
        self.ranks, self.servers = ranks, servers
        self._files = files
        self._planner, self._group = planner, group
        self._look_ups: LookUps | None = None
        place = CachePlace.of(planner.config, planner.facts)
        if place is not None:
            config = planner.config
            states = KVTiers.open_states(config, place)
            self._look_ups = look_ups_of(KVTiers.open(config, place), states)
        self.restart()

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks of each rank."""
        return self._group.num_blocks

    @property
    def shares_contexts(self) -> bool:
        """Whether several ranks share the cache of a request, or the computation of its prompt."""
        parallel = self._planner.config.parallel
        return parallel.dcp * parallel.pcp > 1

    def restart(self, *, num_blocks: int | None = None, is_eager: bool = False) -> None:
        """Remove all requests, and forget the contents of the caches, so that later requests find
        no prefix.

        Args:
            num_blocks: number of blocks that each rank uses from now on; None means all blocks.
            is_eager: whether all following steps run eagerly.
        """
        planner, group, config = self._planner, self._group, self._planner.config
        offer, plan = group.offers[0], group.captured.plan
        chip = Chip(offer.device, offer.cann)
        rule = ExchangeRule.from_config(config, planner.facts, chip)
        if is_eager:
            plan = msgspec.structs.replace(plan, mode="NONE", families=())
        self._answers: dict[str, Answer] = {}
        self._in_flight = 0
        self.scheduler = Scheduler(
            config.scheduler,
            [
                BlockPool(
                    num_blocks or group.num_blocks,
                    Shards.from_config(config).tokens_per_block,
                    prefix_cache=config.shares_prefixes,
                    counts_shared=chip.counts_shared_blocks(config, planner.facts),
                    checkpoints=make_checkpoints(
                        config, has_state=planner.facts.linear is not None
                    ),
                )
                for _ in range(planner.layout.within_group.dp)
            ],
            GraphDispatcher(plan),
            max_model_len=planner.max_model_len,
            num_drafts=config.speculative.num_tokens,
            tp=config.parallel.tp,
            pcp=config.parallel.pcp,
            choose_exchange=rule.choose,
            exact=config.recovery.exact,
            look_ups=self._look_ups,
            files=self._files,
        )

    def submit(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """Add a request; return its answer, to which later steps add tokens."""
        self.scheduler.add(submit(name, prompt, params))
        self._answers[name] = Answer()
        return self._answers[name]

    def abort(self, name: str) -> None:
        """Abort a request. The request may have ended already."""
        if (delta := self.scheduler.abort(name)) is not None:
            self._answers[name].take(delta)

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def run(self, plan: StepPlan) -> list[RankStep]:
        """Run a scheduled step on all ranks; return each rank's result."""
        done = self.ranks.step(plan)
        for delta in self.scheduler.update([step.result for step in done]):
            self._answers[delta.request_id].take(delta)
        return done

    def turn(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run one turn, as an engine does: launch the next step, and process the result of the
        oldest step.

        Args:
            meanwhile: called while steps are in flight.
        """
        plan = self.schedule()
        if plan is not None:
            self._in_flight += 1
            results = self.ranks.launch(plan)
        else:
            results = self.ranks.pause() if self._in_flight else []
        meanwhile()
        if results:
            self._in_flight -= 1
            for delta in self.scheduler.update(results):
                self._answers[delta.request_id].take(delta)
        if self._look_ups is not None:
            self._copy()

    def _copy(self) -> None:
        """Begin new copies of KV blocks, and continue earlier ones, as an engine does."""
        jobs = self.scheduler.copies.take_jobs(is_idle=not self._in_flight)
        for rank, ended in enumerate(self.ranks.copy(jobs)):
            for number, num_whole in ended:
                self.scheduler.copies.end(number, rank, num_whole)

    def finish(self) -> None:
        """Run steps until all requests and all copies of blocks have ended."""
        while self.scheduler.has_work or self.scheduler.copies.is_busy:
            self.turn()

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, prefix: str = "r"
    ) -> list[Answer]:
        """Submit all prompts at the same time; return their complete answers."""
        answers = [self.submit(f"{prefix}{i}", p, params) for i, p in enumerate(prompts)]
        self.finish()
        assert {answer.finish_reason for answer in answers} == {"length"}
        return answers

    def report(self) -> dict[str, Any]:
        """Return a part of a deployment's report: plan, graphs, eager steps by reason, ranks."""
        return {
            **group_report(self._group),
            **engine_report.group_report(self.scheduler, self._group.captured.costs, {}),
        }


@contextmanager
def lockstep(config: Config, nodes: Mapping[str, Config] | None = None) -> Iterator[Lockstep]:
    """Start a group of all ranks of ``config``; end the group when the context ends.

    Args:
        nodes: for each node, its id in Ray and its configuration. Each node gets the same number of
            consecutive ranks. If None, all ranks are on one node.

    Raises:
        DistAclGraphError: for the same reasons as at the start of a deployment.
    """
    planner = Planner.from_config(config)
    assert len(planner.layout.lockstep_groups) == 1
    size, files = planner.layout.world_size, None
    at_ranks: list[Config] = []
    if nodes is not None:
        node_ids = [node_id for node_id in nodes for _ in range(size // len(nodes))]
        at_ranks = [Planner.from_config(nodes[node_id]).config for node_id in node_ids]
        files = GroupFiles.of(planner.config, planner.facts, node_ids)
    with rendezvous() as meeting, rank_processes(planner.config, at_ranks) as ranks:
        group = LockstepGroup(ranks, planner)
        ForkedStartup(planner, group, meeting).run(planner.layout.lockstep_groups, deployment="")
        servers = () if files is None else _open_node_files(ranks, files)
        yield Lockstep(planner, group, ranks, files, servers)


def _open_node_files(ranks: RankProcesses, files: GroupFiles) -> tuple[Address, ...]:
    """On each node without the engine, let one rank run the server of the node's files; return the
    servers' addresses.
    """
    found = {}
    for rank in range(len(files.node_ids)):
        node_id = files.node_ids[rank]
        if node_id == files.nodes[0]:
            continue
        settings = NodeFilesSettings(
            node_id,
            "127.0.0.1",
            TOKEN,
            files.places_beside(rank),
            files.nodes.index(node_id),
            finds=rank in files.finders(rank // len(files.places)),
            fetches=True,
            serves=rank in files.servers,
        )
        ranks.workers[rank].send(("open_node_files", (settings,)))
        found[rank] = ranks.workers[rank].recv()
    return tuple(found[rank].address for rank in files.servers)
