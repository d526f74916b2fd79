"""The workers of one lockstep group: started together, called together, killed together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from dist_aclgraph.actors import placement
from dist_aclgraph.actors.ray_errors import of_worker
from dist_aclgraph.actors.worker import Worker, WorkerInfo
from dist_aclgraph.config import Config
from dist_aclgraph.environment import child_environment
from dist_aclgraph.errors import (
    DistAclGraphError,
    WorkerLostError,
    WorkerStartTimeoutError,
)
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import GraphPlan

PEERS_OF_A_FAILURE_S = 5.0  # how long ranks are waited for once one of them has failed
ASK_S = 2.0  # limit of asking ranks where they stand


@dataclass
class WorkerGroup:
    """Handles in rank order.

    Owns the actors and their placement group. Knows nothing of what the calls mean.

    Attributes:
        ranks: world rank of each worker.
        infos: where each landed.
    """

    ranks: tuple[int, ...]
    workers: list[Any]
    bundles: PlacementGroup
    infos: list[WorkerInfo] = field(default_factory=list)
    phase: str = "NEGOTIATING"  # what a failing graph transaction is part of
    _num_commands: int = 0

    def call(
        self,
        method: str,
        phase: str,
        timeout_s: float,
        arguments: Callable[[int], tuple[Any, ...]] | None = None,
    ) -> list[Any]:
        """Call a method on all workers and return their answers in rank order.

        Args:
            arguments: from a worker's index to the arguments of its call; none by default.

        A rank that reports a failure may have left its peers alone in a collective: they get a
        moment longer, and no more.

        Raises:
            WorkerLostError: a worker died, the others are not waited for; or one reported a failure
                that others did not come back from.
            WorkerStartTimeoutError: some did not answer; names them, and whom to blame if it shows.
            DistAclGraphError: what a worker raised.
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
        """The error for workers that did not answer: theirs, or of the rank that they wait for.

        A rank that waits for its device may wait for its peers in a collective. One that is stuck
        elsewhere, or does not even say where it stands, is the one to blame.
        """
        names = ", ".join(str(self.ranks[i]) for i in silent)
        if failed is not None:
            return WorkerLostError(
                f"{method} failed, and rank {names} did not come back from it: {failed.message}",
                failed.rank,
                phase,
            )
        places = self._ask(silent)
        blamed = [i for i in silent if (place := places[i]) is None or not place["waits"]] or silent
        doing = next((place["doing"] for place in places.values() if place and place["doing"]), "")
        where = "; ".join(f"rank {self.ranks[i]} {_standing(places[i])}" for i in silent)
        return WorkerStartTimeoutError(
            f"{doing or method} was not answered by rank {names} within {timeout_s:g} s: {where}",
            self.ranks[blamed[0]] if len(blamed) == 1 else -1,
            phase,
        )

    def _ask(self, indices: Sequence[int]) -> dict[int, dict[str, Any] | None]:
        """Return where workers stand, asked on their control threads; None for no answer."""
        refs = {i: self.workers[i].ping.remote() for i in indices}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ASK_S)
        places: dict[int, dict[str, Any] | None] = {}
        for i, ref in refs.items():
            try:
                places[i] = ray.get(ref) if ref in ready else None
            except RayError:
                places[i] = None
        return places

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        """Have every rank do one move of a graph transaction.

        Raises:
            WorkerError: as ``call`` does.
        """
        self._num_commands += 1
        command = GraphCommand(0, self._num_commands, action, graph, plan)
        return self.call("carry_out", self.phase, timeout_s, same(command))

    def start_loops(self, address: Any) -> list[Any]:
        """Send every worker into its step loop; the returned references are the death notices."""
        return [worker.run_loop.remote(address) for worker in self.workers]

    def progress(self) -> list[dict[str, Any]]:
        """Return where those workers stand that say so."""
        places = self._ask(range(len(self.workers))).values()
        return [place for place in places if place is not None]

    def kill(self) -> None:
        """End all workers now; a hung one too."""
        for worker in self.workers:
            ray.kill(worker)
        placement.release(self.bundles)


def same(*arguments: Any) -> Callable[[int], tuple[Any, ...]]:
    """Arguments of a call that are the same for every rank."""
    return lambda _: arguments


def _has_failed(answer: Any) -> bool:
    return isinstance(answer, GraphAnswer) and answer.failure is not None


def _standing(place: dict[str, Any] | None) -> str:
    if place is None:
        return "does not say where it stands"
    return "waits for its device" if place["waits"] else "is stuck on its host"


def fetch(ref: Any, rank: int, phase: str) -> Any:
    """Return the value of a finished call, with Ray's errors as ours.

    Raises:
        WorkerLostError: the actor is dead, or raised something that is not ours.
        DistAclGraphError: what the worker raised.
    """
    try:
        return ray.get(ref)
    except RayError as e:
        raise of_worker(e, rank, phase) from None


def start_group(
    config: Config, ranks: Sequence[int], epoch: int, *, is_emulated: bool
) -> WorkerGroup:
    """Place and start the workers of one group; describe where they landed.

    Raises:
        PlacementError: no room.
        WorkerStartTimeoutError, WorkerLostError: a worker did not come up.
    """
    request = placement.plan_bundles(len(ranks), placement.cluster_npus(), is_emulated=is_emulated)
    bundles = placement.reserve(request, config.timeouts.place_s)
    actor = ray.remote(concurrency_groups={"control": 1}, max_restarts=0)(Worker)
    environment = {"env_vars": child_environment(config)}
    workers = [
        actor.options(
            runtime_env=environment,
            **placement.actor_options(bundles, index, request.bundles[index]),
        ).remote(config, epoch)
        for index in range(len(ranks))
    ]
    group = WorkerGroup(tuple(ranks), workers, bundles)
    try:
        group.infos = group.call("describe", "PLACING", config.timeouts.place_s)
    except DistAclGraphError:
        group.kill()
        raise
    _order_by_place(group)
    return group


def _order_by_place(group: WorkerGroup) -> None:
    """Give neighbouring ranks to neighbouring NPUs: by node, then by physical id."""
    order = sorted(
        range(len(group.workers)),
        key=lambda i: (group.infos[i].node_id, group.infos[i].npu_ids, i),
    )
    group.workers = [group.workers[i] for i in order]
    group.infos = [group.infos[i] for i in order]
