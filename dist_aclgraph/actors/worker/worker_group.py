"""Starts, calls and kills all workers of one lockstep group together."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.placement import BundleRequest
from dist_aclgraph.actors.cluster.ray_errors import of_worker
from dist_aclgraph.actors.wire.blame import RankStatuses, judge
from dist_aclgraph.actors.wire.step_channel import ChannelAddress
from dist_aclgraph.actors.worker.rank_facts import WorkerInfo
from dist_aclgraph.actors.worker.worker import Worker
from dist_aclgraph.config import Config
from dist_aclgraph.environment import child_environment
from dist_aclgraph.errors import (
    DistAclGraphError,
    PlacementError,
    WorkerLostError,
    WorkerStartTimeoutError,
)
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.topology import GroupRank, ParallelLayout, WorldRank
from dist_aclgraph.version import build, build_of, hash_sources

PEERS_OF_A_FAILURE_S = 5.0  # seconds to wait for the other ranks after one rank has failed

ASK_S = 2.0  # seconds to wait for the answers of control threads
LOOK_S = 0.1  # seconds between two calls of ``check`` while ``stop_devices`` waits

logger = logging.getLogger(__name__)


@dataclass
class WorkerGroup:
    """The workers of one lockstep group, in the order of their ranks.

    Owns the actors and their placement group.

    Attributes:
        ranks: world rank of each worker.
        request: the resources that were requested for the group.
        bundles: the placement group; None after a new group has taken over the bundles and the
            surviving workers.
        infos: the node and the device of each worker.
        slots: the index of each worker's bundle in the placement group.
    """

    ranks: tuple[WorldRank, ...]
    workers: list[Any]
    request: BundleRequest
    bundles: PlacementGroup | None
    infos: list[WorkerInfo] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    phase: str = "NEGOTIATING"  # errors of graph transactions name this phase
    _num_commands: int = 0

    def call(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        arguments: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call a method on all workers and return their answers in rank order.

        After a rank has reported a failure, the other ranks may wait for this rank in a collective.
        So they must answer within ``PEERS_OF_A_FAILURE_S``.

        Args:
            arguments: a function that returns the arguments for the worker with a given index. If
                None, the method is called without arguments.

        Raises:
            WorkerLostError: a worker died, or a worker reported a failure and other workers did not
                answer after the failure. If a worker died, the call does not wait for other
                workers.
            WorkerStartTimeoutError: workers did not answer. The message names these workers. If it
                is known which rank is to blame, the error names that rank.
            DistAclGraphError: the error that a worker raised.
        """
        refs = [
            getattr(worker, method).remote(*(arguments(i) if arguments else ()))
            for i, worker in enumerate(self.workers)
        ]
        index_of = {ref: i for i, ref in enumerate(refs)}
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + timeout_s
        waiting = list(refs)
        while waiting:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
            if not ready:
                failed = next((answer for answer in answers.values() if _has_failed(answer)), None)
                silent = sorted(index_of[ref] for ref in waiting)
                raise self._silence(method, phase, timeout_s, silent, failed)
            index = index_of[ready[0]]
            answers[index] = fetch(ready[0], self.ranks[index], phase)
            if _has_failed(answers[index]):
                deadline_s = min(deadline_s, time.monotonic() + PEERS_OF_A_FAILURE_S)
        return [answers[i] for i in range(len(refs))]

    def _silence(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        silent: Sequence[int],
        failed: GraphAnswer | None,
    ) -> DistAclGraphError:
        """Return the error for workers that did not answer. The error names the rank to blame if
        this rank is known.
        """
        verdict = judge(self.ranks, ask_workers(self.workers, [GroupRank(i) for i in silent]))
        if failed is not None:
            return WorkerLostError(
                f"{method} failed, and {verdict.silent} did not come back from it: "
                f"{failed.message}",
                self.ranks[failed.rank],
                phase,
            )
        return WorkerStartTimeoutError(
            f"{verdict.doing or method} was not answered by {verdict.silent} within "
            f"{timeout_s:g} s: {verdict.where}",
            verdict.rank,
            phase,
        )

    def find_out(self, timeout_s: float) -> None:
        """Ask the workers on which node and NPU they run. Number the ranks so that neighbouring
        ranks have neighbouring NPUs.

        If the group contains survivors of another group, all workers keep their ranks.

        Raises:
            WorkerStartTimeoutError, WorkerLostError: a worker did not start.
            PlacementError: the ranks have different kinds of devices, or several ranks would use
                one device, or a worker replaces a lost worker of another node.
        """
        infos: list[WorkerInfo] = self.call("describe", "PLACING", timeout_s)
        if self.infos:
            for rank, before, now in zip(self.ranks, self.infos, infos, strict=True):
                if before.node_id != now.node_id:
                    raise PlacementError(f"rank {rank} was on {before.host}, and is on {now.host}")
            order = list(range(len(infos)))
        else:
            order = placement.rank_order([(info.node_id, info.npu_ids) for info in infos])
        self.workers = [self.workers[i] for i in order]
        self.slots = [self.slots[i] for i in order]
        self.infos = [infos[i] for i in order]
        check_builds(self.infos)
        check_devices(self.infos)

    @property
    def node_ids(self) -> list[str]:
        """Ray's ids of the ranks' nodes."""
        return [info.node_id for info in self.infos]

    def beside(self, worker: WorkerInfo) -> list[int]:
        """Return the process ids of the other ranks on a worker's node."""
        return [
            info.pid
            for info in self.infos
            if info.node_id == worker.node_id and info.pid != worker.pid
        ]

    @property
    def is_emulated(self) -> bool:
        return all(info.kind == "emulated" for info in self.infos)

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        """Let every rank do one action of a graph transaction.

        Raises:
            WorkerError: see ``call``.
        """
        self._num_commands += 1
        command = GraphCommand(0, self._num_commands, action, graph, plan)
        return self.call("carry_out", self.phase, timeout_s, for_each_rank(command))

    def start_loops(self, addresses: Sequence[ChannelAddress], number: int) -> list[Any]:
        """Start the step loops of all workers. Return a Ray reference for each loop. The reference
        is ready when the loop has ended.

        Args:
            addresses: for each rank, the address at which it connects to the step channel.
            number: the group's number, for the log.
        """
        return [
            worker.run_loop.remote(address, number)
            for worker, address in zip(self.workers, addresses, strict=True)
        ]

    def progress(self) -> list[dict[str, Any]]:
        """Return the statuses of the workers that answer in time."""
        places = ask_workers(self.workers, [GroupRank(i) for i in range(len(self.workers))])
        return [place for place in places.values() if place is not None]

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        if self.bundles is not None:
            placement.release(self.bundles)


def for_each_rank(*arguments: Any) -> Callable[[int], tuple[Any, ...]]:
    """Return a function that returns ``arguments`` for every rank; see ``WorkerGroup.call``."""
    return lambda _: arguments


def _has_failed(answer: Any) -> bool:
    return isinstance(answer, GraphAnswer) and answer.failure is not None


def fetch(ref: Any, rank: int, phase: str) -> Any:
    """Return the result of a call. Convert Ray's errors to our error types.

    Raises:
        WorkerLostError: the actor is dead, or has raised an error that is not a DistAclGraphError.
        DistAclGraphError: the error that the worker raised.
    """
    try:
        return ray.get(ref)
    except RayError as e:
        raise of_worker(e, rank, phase) from None


def check_builds(infos: Sequence[WorkerInfo]) -> None:
    """Check that all workers of a group run this host's version of the package. A surviving worker
    may still run an older version.

    Raises:
        PlacementError: the message says which host has which version.
    """
    host_of_build = {info.build: info.host for info in infos}
    if len(host_of_build) > 1:
        found = " and ".join(f"{name} on {host}" for name, host in sorted(host_of_build.items()))
        raise PlacementError(f"the ranks of one group run different code: {found}")
    [(theirs, host)] = host_of_build.items()
    if theirs == build():
        return
    if theirs != (here := build_of(hash_sources())):
        raise PlacementError(
            f"{host} has dist_aclgraph {theirs}, and this host {here}: install the same version on "
            "all hosts"
        )
    logger.warning(
        "the files of dist_aclgraph have changed since this service started: %s runs %s, and the "
        "controller %s",
        host,
        theirs,
        build(),
    )


def check_devices(infos: Sequence[WorkerInfo]) -> None:
    """Check that all ranks have devices of the same kind, and that no two ranks share a device.

    Raises:
        PlacementError: the message says which node has which device.
    """
    host_of_kind = {info.kind: info.host for info in infos}
    if len(host_of_kind) > 1:
        found = " and ".join(f"{kind} on {host}" for kind, host in sorted(host_of_kind.items()))
        raise PlacementError(
            f"the nodes of one group have different devices ({found}); choose nodes with "
            "cluster.labels, or set device.kind"
        )
    for info in infos:
        if info.kind == "npu" and not info.npu_ids:
            raise PlacementError(
                f"{info.host} has NPUs of which Ray knows nothing, so that all ranks would take "
                f"the first; {placement.START}"
            )


def check_nodes(infos: Sequence[WorkerInfo], ranks_of_node: int) -> None:
    """Check that each node of a group has exactly ``ranks_of_node`` ranks, as MC2's algorithm
    requires.

    Raises:
        PlacementError: the message says which node has a wrong number of ranks.
    """
    counts = Counter(info.node_id for info in infos)
    for info in infos:
        if (count := counts[info.node_id]) != ranks_of_node:
            raise PlacementError(
                f"{info.host} has {count} of the {len(infos)} ranks that share experts; MC2's "
                f"algorithm hierarchy needs exactly {ranks_of_node} on each node: choose nodes "
                "with cluster.labels, or set parallel.mc2_algorithm=fullmesh"
            )


def place_group(
    config: Config,
    ranks: Sequence[int],
    epoch: int,
    request: BundleRequest,
    *,
    deployment: str,
    python: str | None = None,
) -> WorkerGroup:
    """Place and start the workers of one group. This function does not wait for the workers;
    ``WorkerGroup.find_out`` waits for them.

    Args:
        request: the resources that one group needs; see ``bundles_of_groups``.
        deployment: name of the deployment; the placement group's name begins with it.
        python: the command that starts the workers; None for Ray's own command.
    """
    bundles = placement.reserve(request, config.timeouts.place_s, f"{deployment}/{ranks[0]}")
    slots = [index // request.ranks_of_bundle for index in range(len(ranks))]
    workers = [_start_worker(config, epoch, bundles, request, slot, python) for slot in slots]
    return WorkerGroup(tuple(map(WorldRank, ranks)), workers, request, bundles, slots=slots)


def refill_group(
    config: Config,
    left: WorkerGroup,
    lost: Collection[GroupRank],
    epoch: int,
    *,
    python: str | None = None,
) -> WorkerGroup:
    """Start workers that replace a group's lost ranks. Does not wait for these workers;
    ``find_out`` does.

    The new group takes over the bundles and the surviving workers of ``left``.

    Args:
        python: the command that starts the workers; None for Ray's own command.
    """
    request, bundles = left.request, left.bundles
    assert bundles is not None, "given to one other group only"
    workers = list(left.workers)
    for rank in lost:
        workers[rank] = _start_worker(config, epoch, bundles, request, left.slots[rank], python)
    left.workers, left.bundles = [], None
    return WorkerGroup(left.ranks, workers, request, bundles, left.infos, left.slots)


def _start_worker(
    config: Config,
    epoch: int,
    bundles: PlacementGroup,
    request: BundleRequest,
    slot: int,
    python: str | None,
) -> Any:
    actor = ray.remote(concurrency_groups={"control": 1}, max_restarts=0)(Worker)
    options = placement.actor_options(bundles, request, slot)
    environment = runtime_environment(config, python)
    return actor.options(runtime_env=environment, **options).remote(config, epoch)


def bundles_of_groups(config: Config, num_groups: int) -> BundleRequest:
    """Choose the resources that each new group requests, according to the present nodes of the
    cluster.

    Raises:
        PlacementError: the cluster has fewer NPUs, free and used together, than the groups need.
    """
    return placement.plan_bundles(
        ParallelLayout.from_config(config.parallel),
        num_groups,
        placement.cluster_nodes(),
        config.cluster.labels,
        tp_across_nodes=config.parallel.tp_across_nodes,
        may_be_undeclared=config.device.kind != "npu",
    )


def runtime_environment(config: Config, python: str | None) -> dict[str, Any]:
    """Return the runtime environment of a process. For ``python``, see ``place_group``."""
    environment: dict[str, Any] = {"env_vars": child_environment(config)}
    return environment if python is None else environment | {"py_executable": python}


def stop_devices(
    workers: Sequence[Any], timeout_s: float, check: Callable[[], None]
) -> dict[GroupRank, str]:
    """Let all workers stop their devices. Return the ranks whose devices did not stop, with the
    reasons.

    Args:
        timeout_s: maximum number of seconds in which a worker stops its device. If this time is too
            short, the worker ends its own process.
        check: a function that is called several times a second, and can raise an error to end the
            wait.
    """
    refs = {worker.stop_device.remote(timeout_s): i for i, worker in enumerate(workers)}
    deadline_s = time.monotonic() + timeout_s
    waiting, silent = list(refs), dict[GroupRank, str]()
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_S)
        check()
        for ref in ready:
            index = refs[ref]
            try:
                fetch(ref, index, "")
            except DistAclGraphError as e:
                silent[GroupRank(index)] = str(e)
        if waiting and time.monotonic() > deadline_s:
            late = f"its device did not stop within {timeout_s:g} s"
            return silent | {GroupRank(refs[ref]): late for ref in waiting}
    return silent


def ask_workers(workers: Sequence[Any], ranks: Sequence[GroupRank]) -> RankStatuses:
    """Ask the control threads of these workers for their statuses. The status of a worker that does
    not answer is None.
    """
    refs = {rank: workers[rank].ping.remote() for rank in ranks}
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ASK_S)
    places: dict[GroupRank, dict[str, Any] | None] = {}
    for rank, ref in refs.items():
        try:
            places[rank] = ray.get(ref) if ref in ready else None
        except RayError:
            places[rank] = None
    return places
