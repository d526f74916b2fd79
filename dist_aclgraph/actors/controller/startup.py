"""Runs the phases of a start, from the configuration to captured graphs. All groups of the start
run the phases in parallel.

A group waits for other groups only to agree on a common plan. Each phase has a deadline. An error
names the rank and the phase.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import ray

from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.capture.lockstep_capture import (
    CaptureRecord,
    agree,
    capture_plan,
    probe_graphs,
)
from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.state import State
from dist_aclgraph.actors.engine.engine import Engine
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.worker.rank_facts import WorkerInfo
from dist_aclgraph.actors.worker.worker_group import (
    WorkerGroup,
    bundles_of_groups,
    check_nodes,
    for_each_rank,
    place_group,
    refill_group,
    runtime_environment,
)
from dist_aclgraph.errors import WorkerError, WorkerStartTimeoutError
from dist_aclgraph.models.read_ahead import ALONE, Neighbour
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit
from dist_aclgraph.topology import GroupRank, Ranks

# The first epoch of a group. The epoch grows by 1 each time that the group resumes after a fault.
EPOCH = 1
MIB = 1 << 20
TRIAL_BLOCKS = 2  # few blocks suffice, because trial steps have only padding rows

T = TypeVar("T")
Job = TypeVar("Job")
OnPhase = Callable[[State], object]
# A function that is called with the number of captured graphs, the number of all graphs, and a text
# about the next graph.
OnGraph = Callable[[int, int, str], None]


class Startup:
    """Runs the phases of a start. Appends each started group to ``groups``, which the controller
    owns.
    """

    def __init__(
        self,
        planner: Planner,
        groups: list[LockstepGroup],
        starter: ProcessStarter,
        start_limit: StartLimit,
        on_phase: OnPhase,
        on_graph: OnGraph,
    ) -> None:
        self._planner = planner
        self._config = planner.config
        self._groups = groups
        self._starter = starter
        self._start_limit = start_limit
        self._enter = on_phase
        self._show = on_graph
        self._phase = State.PLACING
        self._moving = threading.Lock()
        # The command that starts ranks and engines; None for Ray's own command.
        self._python: str | None = None

    @property
    def has_placed(self) -> bool:
        """Whether all processes have started."""
        return self._phase is not State.PLACING

    def run(self, ranks: Sequence[Ranks], *, deployment: str) -> None:
        """Run all phases until the graphs are captured.

        Args:
            ranks: the world ranks of each group.

        Raises:
            DistAclGraphError: the first error of any group.
        """
        self._python = self._start_command()
        self._place(ranks, deployment)
        self._come_up()

    def rejoin(self, left: WorkerGroup, lost: Collection[GroupRank]) -> None:
        """Run all phases for a new group of surviving workers. New workers get the lost ranks.

        Args:
            left: the workers of the lost group. The surviving workers no longer belong to this
                group.

        Raises:
            DistAclGraphError: the first error.
        """
        self._python = self._start_command()
        workers = refill_group(self._config, left, lost, EPOCH, python=self._python)
        self._groups.append(LockstepGroup(workers, self._planner, is_rejoined=True))
        self._come_up()

    def _come_up(self) -> None:
        """Run the phases that follow the start of processes, until the graphs are captured."""
        self._find_out()
        self._go(State.JOINING)
        self._each(self._join)
        self._each(self._check_nodes)
        self._go(State.LOADING)
        self._each(self._load)
        self._go(State.NEGOTIATING)
        self._each(self._make_runners)
        self._each(self._ask_offers)
        side_by_side(self._plan_groups, self.scopes)

    def _start_command(self) -> str | None:
        """Return the command that starts ranks and engines.

        None means Ray's own command. A cluster with several nodes always uses Ray's own command.
        """
        if len(placement.cluster_nodes()) > 1:
            return None
        return self._starter.command(self._config)

    @property
    def scopes(self) -> list[list[LockstepGroup]]:
        """The groups, divided into scopes. All groups of a scope share one graph plan."""
        if self._config.graph.scope == "group":
            return [[group] for group in self._groups]
        return [self._groups]

    def _go(self, phase: State) -> None:
        self._phase = phase
        self._enter(phase)

    def _go_on_to_capture(self) -> None:
        """Enter CAPTURING; later calls have no effect. Called when the groups of one scope have
        their plan; other scopes may still negotiate.
        """
        with self._moving:
            if self._phase is State.NEGOTIATING:
                self._go(State.CAPTURING)
                for group in self._groups:
                    group.workers.phase = self._phase.value

    def _each(self, work: Callable[[LockstepGroup], T]) -> list[T]:
        return side_by_side(work, self._groups)

    def _place(self, ranks: Sequence[Ranks], deployment: str) -> None:
        request = bundles_of_groups(self._config, len(ranks))

        def place(members: Ranks) -> WorkerGroup | Exception:
            try:
                return place_group(
                    self._config,
                    members,
                    EPOCH,
                    request,
                    deployment=deployment,
                    python=self._python,
                )
            # The error is raised after all groups have been placed or have failed. So all placed
            # groups are stored in ``_groups``, and the caller can end their processes.
            except Exception as e:
                return e

        placed = side_by_side(place, ranks)
        self._groups += [
            LockstepGroup(found, self._planner)
            for found in placed
            if isinstance(found, WorkerGroup)
        ]
        for found in placed:
            if isinstance(found, Exception):
                raise found

    def _find_out(self) -> None:
        """Start the engines, and ask each worker for its node."""
        for group in self._groups:
            assert group.workers.bundles is not None
            group.engine = self._engine_at(placement.leading_node(group.workers.bundles))
        timeouts = self._config.timeouts
        # Processes of a fork server start only after the fork server has loaded its libraries.
        # Without a fork server, processes load the libraries in the phase JOINING. So the limit for
        # a fork server contains the time for JOINING.
        longest_s = timeouts.place_s + (timeouts.join_s if self._python is not None else 0.0)
        timeout_s, started_s = self._start_limit.seconds(longest_s), time.monotonic()
        try:
            self._each(lambda group: group.workers.find_out(timeout_s))
            left_s = started_s + timeout_s - time.monotonic()
            self._each(lambda group: _wait_for_engine(group.engine, max(1.0, left_s)))
        except WorkerStartTimeoutError:
            self._start_limit.exceeded()
            raise
        self._start_limit.note(time.monotonic() - started_s)

    def _join(self, group: LockstepGroup) -> None:
        timeouts, workers = self._config.timeouts, group.workers
        timeout_s = timeouts.join_s
        leader = workers.infos[0]
        spans_nodes = len(set(workers.node_ids)) > 1
        opening = group.engine.open.remote(
            workers.ranks,
            workers.workers,
            node_id=leader.node_id,
            workers_host=leader.node_ip if spans_nodes else None,
            clients_host=leader.node_ip if placement.may_have_others(leader.node_ip) else None,
        )
        prepared = [(self._neighbour(info), workers.beside(info)) for info in workers.infos]
        workers.call("prepare", "JOINING", timeouts.load_s, prepared.__getitem__)
        rendezvous = ray.get(opening, timeout=2 * timeout_s)
        if spans_nodes:
            rendezvous = ray.get(workers.workers[0].open_meeting.remote(), timeout=timeout_s)
        group.devices = workers.call(
            "join",
            "JOINING",
            timeout_s,
            _places(workers, rendezvous),
        )

    def _check_nodes(self, group: LockstepGroup) -> None:
        """Check that each node runs the number of ranks that its chips and its CANN version
        require.

        An emulated host may have any number of ranks.
        """
        if group.workers.is_emulated:
            return
        for device in group.devices:
            if device.ranks_of_node is not None:
                check_nodes(group.workers.infos, device.ranks_of_node)

    def _engine_at(self, node_id: str) -> Any:
        """Start an engine on ``node_id``, the node of the group's first worker."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(
            num_cpus=0, max_restarts=0, max_concurrency=6, concurrency_groups={"control": 1}
        )(Engine)
        options: dict[str, Any] = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)
        }
        if self._python is not None:
            options["runtime_env"] = runtime_environment(self._config, self._python)
        return actor.options(**options).remote(self._config)

    def _load(self, group: LockstepGroup) -> None:
        loaded = group.workers.call("load", "LOADING", self._config.timeouts.load_s)
        group.weight_bytes = max(weights.num_bytes for weights in loaded)
        group.fusions = loaded[0].fusions

    def _neighbour(self, worker: WorkerInfo) -> Neighbour:
        """Return the worker's index among the workers that load weights on the same node, and the
        number of these workers.
        """
        if worker.has_weights:
            return ALONE
        infos = [info for group in self._groups for info in group.workers.infos]
        loading = [info for info in infos if not info.has_weights]
        there = [info.pid for info in loading if info.node_id == worker.node_id]
        return Neighbour(there.index(worker.pid), len(there))

    # ---- the plan

    def _make_runners(self, group: LockstepGroup) -> None:
        """Let every rank create a runner for trial steps. The KV cache of such a runner has few
        blocks.
        """
        timeout_s = self._config.timeouts.negotiate_s
        query_len = self._config.speculative.num_tokens + 1
        # The smallest batch, which is used for an eager step if no graph will be captured.
        smallest = BatchDescriptor(query_len, 1, query_len, "FULL")
        largest = self._planner.largest_graphs or [smallest]
        # Each padding row has a length of one token, and CANN 8.5 needs one block for each row.
        num_blocks = max(TRIAL_BLOCKS, *(graph.num_reqs for graph in largest))
        group.workers.call(
            "make_runner",
            "NEGOTIATING",
            timeout_s,
            for_each_rank(num_blocks, self._planner.max_model_len, largest),
        )
        # To prepare a graph, a rank runs an eager step, which creates the HCCL domains and the side
        # streams. A rank must offer only the remaining streams. So all graphs are prepared before
        # the offers.
        for graph in largest:
            answers = group.workers.carry_out("prepare", timeout_s, graph)
            for rank, answer in zip(group.workers.ranks, answers, strict=True):
                if answer.failure is not None:
                    raise WorkerError(answer.message, rank, "NEGOTIATING")

    def _ask_offers(self, group: LockstepGroup) -> None:
        """Collect the resources that all ranks offer for graphs. The calibrated budget model also
        needs measured costs, which come from probe graphs.
        """
        timeout_s = self._config.timeouts.negotiate_s
        group.offers = group.workers.call("offer", "NEGOTIATING", timeout_s)
        if self._config.graph.budget_model == "calibrated":
            largest = self._planner.largest_graphs
            group.offers = probe_graphs(self._transaction(group), largest, group.offers)

    def _plan_groups(self, groups: list[LockstepGroup]) -> None:
        """Negotiate a plan for ``groups``, allocate the caches in the remaining memory, and capture
        the plan.
        """
        config, planner = self._config, self._planner
        negotiated = planner.negotiate([offer for group in groups for offer in group.offers])
        plan = negotiated.plan
        offer_of = {offer.rank: offer for offer in negotiated.offers}
        for group in groups:
            group.lazy_capacity = negotiated.lazy_capacity
            group.offers = [offer_of[offer.rank] for offer in group.offers]
        if plan.families:
            self._go_on_to_capture()

        def capture(group: LockstepGroup) -> None:
            reserved = planner.reserved_bytes(plan, negotiated.offers)
            group.num_blocks = planner.cache_spec.choose_num_blocks(
                config,
                min(offer.free_bytes - reserved[offer.rank] for offer in group.offers),
                planner.max_model_len,
            )
            group.workers.call(
                "make_cache",
                self._phase.value,
                config.timeouts.negotiate_s,
                for_each_rank(group.num_blocks),
            )
            group.ledgers = [Ledger.predict(o, plan, planner.budget_model) for o in group.offers]
            group.record = self._capture(group, plan)

        side_by_side(capture, groups)

        def capture_again(index: int, plan: GraphPlan) -> CaptureRecord:
            group = groups[index]
            group.record = self._capture(group, plan)
            return group.record

        agree([group.captured for group in groups], capture_again)

    def _capture(self, group: LockstepGroup, plan: GraphPlan) -> CaptureRecord:
        transaction = self._transaction(group)
        if group.record is not None:  # release the graphs of the previous plan
            transaction.release(group.record.plan.capture_order)

        def show(record: CaptureRecord, graph: BatchDescriptor | None) -> None:
            done, total = len(record.costs), record.plan.num_graphs
            left = min(offer.available for offer in group.offers)
            detail = _progress_of(record, graph, left)
            self._show(done, total, detail)

        record = capture_plan(transaction, plan, group.ledgers, show)
        timeout_s = self._config.timeouts.negotiate_s
        held = group.workers.call("pool_bytes", self._phase.value, timeout_s)
        group.pool_bytes = max(held)
        for ledger, count in zip(group.ledgers, held, strict=True):
            ledger.measure("graph pool", count, "bytes")
        return record

    def _transaction(self, group: LockstepGroup) -> GraphTransaction:
        timeouts = self._config.timeouts
        return GraphTransaction(group.workers, timeouts.negotiate_s, timeouts.capture_s)


def side_by_side(work: Callable[[Job], T], parts: Sequence[Job]) -> list[T]:
    """Call ``work`` for all parts at the same time, each in a thread. Return the results in the
    order of ``parts``.

    Raises:
        Exception: the first error. The caller must stop the actors of all parts, because other
            threads may still run.
    """
    pool = concurrent.futures.ThreadPoolExecutor(len(parts), "group")
    try:
        working = [pool.submit(work, part) for part in parts]
        for done in concurrent.futures.as_completed(working):
            done.result()
        return [future.result() for future in working]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _progress_of(record: CaptureRecord, graph: BatchDescriptor | None, available: int) -> str:
    """Return a text that shows the next graph, the smallest number of free streams on any rank, and
    the bytes that the graphs use.
    """
    left = available - sum(cost.streams for cost in record.costs.values())
    held = sum(cost.bytes for cost in record.costs.values())
    return f"{graph or 'done'}; {left} streams left, {held / MIB:.1f} MiB taken"


def _wait_for_engine(engine: Any, timeout_s: float) -> None:
    """Wait until the process of an engine has started.

    Raises:
        WorkerStartTimeoutError: the process did not start in time.
    """
    ready, _ = ray.wait([engine.__ray_ready__.remote()], timeout=timeout_s)
    if not ready:
        raise WorkerStartTimeoutError(
            f"the engine's process did not start within {timeout_s:.0f} s", phase="PLACING"
        )
    ray.get(ready[0])


def _places(workers: WorkerGroup, rendezvous: str) -> Callable[[int], tuple[Any, ...]]:
    """Return a function that maps a worker's index to the arguments of ``Worker.join``: world rank,
    index, rendezvous.
    """
    return lambda index: (workers.ranks[index], index, rendezvous)
