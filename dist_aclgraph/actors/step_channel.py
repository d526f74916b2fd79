"""The hot path between an engine and its workers: plans out to all, results back from all.

ZeroMQ PUB/SUB for plans and PUSH/PULL for results, MessagePack inside; ``addresses.py`` says where.
Every message carries epoch and step; stale ones are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from dist_aclgraph.actors.addresses import Endpoint, Listener, Place
from dist_aclgraph.actors.sockets import MAX_MESSAGE_BYTES, has_message, read_frame
from dist_aclgraph.actors.standing import Ask, Places, judge
from dist_aclgraph.errors import (
    DeviceFaultError,
    NotAMessageError,
    WorkerLostError,
    WorkerStartTimeoutError,
)
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.steps.step import (
    Answered,
    FromWorker,
    Halt,
    Pause,
    Resume,
    Shutdown,
    StepPlan,
    StepResult,
    ToWorker,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)
from dist_aclgraph.topology import GroupRank, WorldRank

POLL_MS = 100  # how often a wait looks whether it should end

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelAddress:
    """Where a worker finds its engine: one endpoint for each direction."""

    plans: Endpoint
    results: Endpoint


class Deadline:
    """A limit for several waits together."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at_s = time.monotonic() + timeout_s


def nobody_says(ranks: Sequence[GroupRank]) -> Places:
    """The answers of ranks that cannot be asked."""
    return dict.fromkeys(ranks)


class StepSender:
    """The engine's end. Owns both sockets."""

    def __init__(
        self,
        world_ranks: Sequence[WorldRank],
        place: Place,
        ask: Ask = nobody_says,
    ) -> None:
        """Bind.

        Args:
            world_ranks: of the group's workers, which answer with their ranks in the group.
            place: where the sockets listen.
            ask: where ranks stand that did not answer in time.

        Raises:
            PlacementError: no port is free.
        """
        self._world_ranks = tuple(world_ranks)
        self._num_workers = len(world_ranks)
        self._ask = ask
        self._context = zmq.Context(io_threads=1)
        self._plans = self._context.socket(zmq.XPUB)
        # Verbose: equal subscriptions of several workers are several messages, so they count.
        self._plans.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._results = self._context.socket(zmq.PULL)
        self._plans.setsockopt(zmq.LINGER, 0)
        self._results.setsockopt(zmq.LINGER, 0)
        self._listener = Listener(self._context, place)
        self._plans_at = self._listener.bind(self._plans, "plans")
        self._results_at = self._listener.bind(self._results, "results")

    def address_for(self, node_id: str) -> ChannelAddress:
        """Return where a worker on a node finds this end."""
        return ChannelAddress(
            self._plans_at.seen_from(node_id), self._results_at.seen_from(node_id)
        )

    def wait_for_workers(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Return when every worker listens; plans sent earlier would be lost.

        Raises:
            WorkerStartTimeoutError: not all did in time.
        """
        deadline_s = time.monotonic() + timeout_s
        for connected in range(self._num_workers):
            while not self._plans.poll(POLL_MS):
                check()
                if time.monotonic() > deadline_s:
                    raise WorkerStartTimeoutError(
                        f"{connected} of {self._num_workers} workers listened for steps within "
                        f"{timeout_s:g} s",
                        phase="CAPTURING",
                    )
            self._plans.recv()

    def send(self, message: ToWorker) -> None:
        self._plans.send(encoder.encode(message))

    def receive(
        self, plan: StepPlan, timeout_s: float, check: Callable[[], None]
    ) -> list[StepResult]:
        """Return the results of ``plan`` from all workers, in order of arrival.

        Raises:
            WorkerLostError: a worker failed or did not answer in time; names the rank.
        """
        results: dict[GroupRank, StepResult] = {}
        deadline = Deadline(timeout_s)
        while len(results) < self._num_workers:
            result = self._next(f"step {plan.step}", set(results), deadline, check)
            if not isinstance(result, StepResult) or result.step < plan.step:
                continue
            if result.epoch != plan.epoch:
                continue
            if result.error:
                raise self._failure(result)
            if result.step == plan.step:
                results[GroupRank(result.rank)] = result
        return list(results.values())

    def _failure(self, result: StepResult) -> WorkerLostError:
        """The error for what a rank has reported."""
        rank = self._world_ranks[result.rank]
        if result.fault is None:
            return WorkerLostError(result.error, rank, "SERVING")
        return DeviceFaultError(result.error, rank, "SERVING", result.fault)

    def receive_answers(
        self, epoch: int, timeout_s: float, check: Callable[[], None]
    ) -> dict[GroupRank, str]:
        """Return why ranks have not halted, or not resumed; see ``Answered``.

        Raises:
            WorkerLostError: a worker did not answer in time; names the rank.
        """
        errors: dict[GroupRank, str] = {}
        deadline = Deadline(timeout_s)
        while len(errors) < self._num_workers:
            answer = self._next("coming back", set(errors), deadline, check)
            if isinstance(answer, Answered) and answer.epoch == epoch:
                errors[GroupRank(answer.rank)] = answer.error
        return {rank: error for rank, error in errors.items() if error}

    def receive_votes(
        self, command: GraphCommand, timeout_s: float, check: Callable[[], None]
    ) -> list[GraphAnswer]:
        """Return the answers to ``command`` from all workers, in rank order.

        Raises:
            WorkerLostError: a worker did not answer in time; names the rank.
        """
        votes: dict[GroupRank, GraphAnswer] = {}
        deadline = Deadline(timeout_s)
        while len(votes) < self._num_workers:
            vote = self._next(f"'{command}'", set(votes), deadline, check)
            if not isinstance(vote, GraphAnswer) or vote.number != command.number:
                continue
            if vote.epoch == command.epoch:
                votes[GroupRank(vote.rank)] = vote
        return [votes[rank] for rank in sorted(votes)]

    def _next(
        self, what: str, answered: set[GroupRank], deadline: Deadline, check: Callable[[], None]
    ) -> FromWorker:
        while True:
            while not self._results.poll(POLL_MS):
                check()
                if time.monotonic() > deadline.at_s:
                    raise self._silence(what, answered, deadline.timeout_s)
            try:
                message = read_frame(from_worker_decoder, self._results.recv())
            except NotAMessageError as e:
                logger.debug("dropped: %s", e)
                continue
            if 0 <= message.rank < self._num_workers:
                return message

    def _silence(self, what: str, answered: set[GroupRank], timeout_s: float) -> WorkerLostError:
        missing = [r for r in map(GroupRank, range(self._num_workers)) if r not in answered]
        verdict = judge(self._world_ranks, self._ask(missing))
        return WorkerLostError(
            f"{what} was not answered by {verdict.silent} within {timeout_s:g} s: {verdict.where}",
            verdict.rank,
            "SERVING",
        )

    def close(self, epoch: int) -> None:
        """Tell workers to leave their loop, and close the sockets."""
        try:
            self.send(Shutdown(epoch))
        finally:
            # The farewell gets a moment; a dead worker must not hold us.
            self._plans.close(linger=200)
            self._results.close(linger=0)
            self._listener.close()
            self._context.term()


class StepReceiver:
    """A worker's end. Owns both sockets."""

    def __init__(self, address: ChannelAddress) -> None:
        self._context = zmq.Context(io_threads=1)
        self._plans = self._context.socket(zmq.SUB)
        self._results = self._context.socket(zmq.PUSH)
        for socket in (self._plans, self._results):
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        address.results.connect(self._results)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        address.plans.connect(self._plans)

    def has_message(self) -> bool:
        """Say whether ``receive`` would find a message."""
        return has_message(self._plans)

    def receive(self, epoch: int) -> StepPlan | GraphCommand | Pause | Halt | Resume | None:
        """Return the next message of ``epoch``, or None when the engine shuts down.

        What is no message is dropped.
        """
        while True:
            try:
                message = read_frame(to_worker_decoder, self._plans.recv())
            except NotAMessageError as e:
                logger.debug("dropped: %s", e)
                continue
            if message.epoch == epoch:
                return None if isinstance(message, Shutdown) else message

    def send(self, result: FromWorker) -> None:
        self._results.send(encoder.encode(result))

    def close(self) -> None:
        self._plans.close()
        self._results.close()
        self._context.term()
