"""The step channel: an engine sends each step's plan to all workers of its group, and receives the
workers' results.

Workers on the engine's node use Unix sockets (``local_steps.py``). Workers on other nodes use
ZeroMQ (``remote_steps.py``). Messages are MessagePack. Every message contains its epoch and its
step. The receiver drops messages of earlier epochs or steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence

from dist_aclgraph.actors.wire.addresses import Place, reached_here_alone
from dist_aclgraph.actors.wire.blame import AskRanks, RankStatuses, judge
from dist_aclgraph.actors.wire.local_steps import LocalEngine, LocalPeers, SocketFile
from dist_aclgraph.actors.wire.remote_steps import Endpoints, RemoteEngine, RemotePeers
from dist_aclgraph.actors.wire.sockets import read_frame
from dist_aclgraph.errors import (
    DeviceFaultError,
    NotAMessageError,
    WorkerLostError,
    WorkerStartTimeoutError,
)
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.steps.copies import BlockCopyJobs, CopiedBlocks, CopyJob
from dist_aclgraph.steps.step import (
    FromWorker,
    Pause,
    RankPlan,
    Resume,
    Resumed,
    Shutdown,
    StepPlan,
    StepResult,
    ToAllWorkers,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)
from dist_aclgraph.topology import GroupRank, WorldRank

POLL_S = 0.1  # seconds between two checks whether a wait should end
# Seconds to wait for frames of the other workers after a worker's connection has ended.
GONE_S = 1.0
SOCKET_FILE = "steps"

logger = logging.getLogger(__name__)


ChannelAddress = SocketFile | Endpoints  # the address at which a worker connects to its engine


class Deadline:
    """A time limit that several waits share."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at_s = time.monotonic() + timeout_s

    def shorten(self, timeout_s: float) -> None:
        """Limit the remaining time to ``timeout_s``."""
        self.at_s = min(self.at_s, time.monotonic() + timeout_s)


def unknown_statuses(ranks: Sequence[GroupRank]) -> RankStatuses:
    """Return None as the status of each rank. This function is used if ranks cannot be asked for
    their statuses.
    """
    return dict.fromkeys(ranks)


class StepSender:
    """The engine's side of the channel. Owns the sockets for workers on all nodes.

    Attributes:
        num_workers: number of workers of the group.
    """

    def __init__(
        self,
        world_ranks: Sequence[WorldRank],
        place: Place,
        ask: AskRanks = unknown_statuses,
        *,
        ranks_per_batch: int = 1,
    ) -> None:
        """Bind the sockets.

        Args:
            world_ranks: world ranks of the group's workers, in the order of group ranks. The
                workers' answers contain group ranks.
            place: the address and ports at which the sockets listen.
            ask: a function that returns the statuses of given ranks. The function is called for
                ranks that did not answer in time.
            ranks_per_batch: number of workers of each data-parallel rank. These workers get the
                same messages.

        Raises:
            PlacementError: no port is free.
        """
        self._world_ranks = tuple(world_ranks)
        self.num_workers = len(world_ranks)
        self._ranks_per_batch = ranks_per_batch
        self._ask = ask
        self._copied: list[CopiedBlocks] = []
        self._place = place
        self._local = LocalPeers(f"{place.directory}/{SOCKET_FILE}", self._num_batches)
        self._remote: RemotePeers | None = None
        if place.host is not None:
            try:
                self._remote = RemotePeers(place)
            except BaseException:
                self._local.close()
                raise

    @property
    def _num_batches(self) -> int:
        return self.num_workers // self._ranks_per_batch

    def address_for(self, node_id: str, rank: GroupRank) -> ChannelAddress:
        """Return the address to which the worker of ``rank``, on node ``node_id``, connects.

        Raises:
            PlacementError: the worker is on another node, but the engine expects no such workers.
        """
        dp_rank = rank // self._ranks_per_batch
        if node_id == self._place.node_id:
            return self._local.address_for(dp_rank)
        if self._remote is None:
            raise reached_here_alone(self._place.node_id, node_id)
        return self._remote.address_for(node_id, dp_rank)

    def wait_for_workers(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until every worker is connected, because plans that are sent earlier would be lost.

        Raises:
            WorkerStartTimeoutError: a worker did not connect in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (connected := self._num_connected()) < self.num_workers:
            check()
            if time.monotonic() > deadline_s:
                raise WorkerStartTimeoutError(
                    f"{connected} of {self.num_workers} workers listened for steps within "
                    f"{timeout_s:g} s",
                    phase="CAPTURING",
                )
            self._wait()

    def _num_connected(self) -> int:
        remote = 0 if self._remote is None else self._remote.num_workers
        return self._local.num_workers + remote

    def send(self, message: StepPlan | ToAllWorkers) -> None:
        """If ``message`` is a plan, send each worker the part for its data-parallel rank. Otherwise
        send ``message`` to all workers.
        """
        if isinstance(message, StepPlan):
            parts = map(message.for_rank, range(self._num_batches))
            frames = list(map(encoder.encode, parts))
        else:
            frames = [encoder.encode(message)] * self._num_batches
        self._send_frames(frames)

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        self._local.send(frames)
        if self._remote is not None:
            self._remote.send(frames)

    def send_copies(self, epoch: int, number: int, jobs: Sequence[tuple[CopyJob, ...]]) -> None:
        """Send new copy jobs to the workers of each data-parallel rank."""
        frames = [encoder.encode(BlockCopyJobs(epoch, number, each)) for each in jobs]
        self._send_frames(frames)

    def take_copied(self) -> list[CopiedBlocks]:
        """Return the workers' replies to ``send_copies`` that arrived since the last call."""
        copied, self._copied = self._copied, []
        return copied

    def poll_copied(self, epoch: int) -> None:
        """Receive the replies to ``send_copies`` that have arrived. To be called only if no step is
        in flight.

        Messages about earlier steps or earlier epochs are dropped.

        Raises:
            WorkerLostError: a worker failed; the error names the rank.
        """
        self._local.wait(0)
        while (frame := self._take()) is not None:
            message = self._read(frame)
            if isinstance(message, StepResult) and message.error and message.epoch == epoch:
                raise self._failure(message)

    def _read(self, frame: bytes) -> FromWorker | None:
        """Return the message in a frame. Return None if the frame contains no valid message, or if
        the message's rank is not in the group. Also return None for a reply to ``send_copies``,
        which is stored for ``take_copied``.
        """
        try:
            message = read_frame(from_worker_decoder, frame)
        except NotAMessageError as e:
            logger.debug("dropped: %s", e)
            return None
        if not 0 <= message.rank < self.num_workers:
            return None
        if isinstance(message, CopiedBlocks):
            self._copied.append(message)
            return None
        return message

    def receive(
        self, plan: StepPlan, timeout_s: float, check: Callable[[], None]
    ) -> list[StepResult]:
        """Return the results of ``plan`` from all workers, in the order of arrival.

        Raises:
            WorkerLostError: a worker failed or did not answer in time; the error names the rank.
        """
        results: dict[GroupRank, StepResult] = {}
        what, deadline = f"step {plan.step}", Deadline(timeout_s)
        while len(results) < self.num_workers:
            result = self._next(what, results, deadline, check)
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
        """Return the error for the failure that a rank reported."""
        rank = self._world_ranks[result.rank]
        if result.fault is None:
            return WorkerLostError(result.error, rank, "SERVING")
        return DeviceFaultError(result.error, rank, "SERVING", result.fault)

    def receive_resumed(
        self, epoch: int, timeout_s: float, check: Callable[[], None]
    ) -> dict[GroupRank, str]:
        """Wait until every rank has reported whether it runs again in this epoch. Return the ranks
        that could not be resumed, with the reasons.

        Raises:
            WorkerLostError: a worker did not answer in time; the error names the rank.
        """
        errors: dict[GroupRank, str] = {}
        deadline = Deadline(timeout_s)
        while len(errors) < self.num_workers:
            answer = self._next("coming back", errors, deadline, check)
            if isinstance(answer, Resumed) and answer.epoch == epoch:
                errors[GroupRank(answer.rank)] = answer.error
        return {rank: error for rank, error in errors.items() if error}

    def receive_votes(
        self, command: GraphCommand, timeout_s: float, check: Callable[[], None]
    ) -> list[GraphAnswer]:
        """Return the answers to ``command`` from all workers, in rank order.

        Raises:
            WorkerLostError: a worker did not answer in time; the error names the rank.
        """
        votes: dict[GroupRank, GraphAnswer] = {}
        deadline = Deadline(timeout_s)
        while len(votes) < self.num_workers:
            vote = self._next(f"'{command}'", votes, deadline, check)
            if not isinstance(vote, GraphAnswer) or vote.number != command.number:
                continue
            if vote.epoch == command.epoch:
                votes[GroupRank(vote.rank)] = vote
        return [votes[rank] for rank in sorted(votes)]

    def _next(
        self,
        what: str,
        answered: Container[GroupRank],
        deadline: Deadline,
        check: Callable[[], None],
    ) -> FromWorker:
        while True:
            while (frame := self._take()) is None:
                if self._wait() and (frame := self._take()) is not None:
                    break
                check()
                if self._local.num_lost:
                    deadline.shorten(GONE_S)
                if time.monotonic() > deadline.at_s:
                    raise self._silence(what, answered, deadline.timeout_s)
            message = self._read(frame)
            if message is not None:
                return message

    def _wait(self) -> bool:
        """Wait at most ``POLL_S`` for a frame. Return whether a frame may have arrived."""
        if self._remote is None:
            return self._local.wait(POLL_S)
        found = self._remote.wait(POLL_S, beside=self._local.fileno())
        self._local.wait(0)
        return found

    def _take(self) -> bytes | None:
        """Return the next frame of any worker; None if there is none."""
        frame = self._local.poll_frame()
        if frame is None and self._remote is not None:
            frame = self._remote.poll_frame()
        return frame

    def _silence(
        self, what: str, answered: Container[GroupRank], timeout_s: float
    ) -> WorkerLostError:
        missing = [r for r in map(GroupRank, range(self.num_workers)) if r not in answered]
        verdict = judge(self._world_ranks, self._ask(missing))
        when = f"within {timeout_s:g} s"
        if self._local.num_lost:
            when = "before a worker's connection ended"
        return WorkerLostError(
            f"{what} was not answered by {verdict.silent} {when}: {verdict.where}",
            verdict.rank,
            "SERVING",
        )

    def close(self, epoch: int) -> None:
        """Tell workers to leave their step loops, and close the sockets."""
        try:
            self.send(Shutdown(epoch))
        finally:
            self._local.close()
            if self._remote is not None:
                self._remote.close()


class StepReceiver:
    """A worker's side of the channel. Owns its connection."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect to the engine.

        Raises:
            EngineDeadError: the engine is on this node, but does not listen.
        """
        self._engine: LocalEngine | RemoteEngine
        if isinstance(address, SocketFile):
            self._engine = LocalEngine(address)
        else:
            self._engine = RemoteEngine(address)

    def has_message(self) -> bool:
        """Return whether a message from the engine waits to be received."""
        return self._engine.has_message()

    def receive(
        self, epoch: int
    ) -> RankPlan | BlockCopyJobs | GraphCommand | Pause | Resume | None:
        """Return the next message of ``epoch``; None if the engine shuts down.

        Frames that are not messages are dropped.

        Raises:
            EngineDeadError: ``end`` was called, or the engine's process has ended. The end of a
                process is noticed only if the engine is on this node.
        """
        while True:
            try:
                message = read_frame(to_worker_decoder, self._engine.receive())
            except NotAMessageError as e:
                logger.debug("dropped: %s", e)
                continue
            if message.epoch == epoch:
                return None if isinstance(message, Shutdown) else message

    def send(self, result: FromWorker) -> None:
        self._engine.send(encoder.encode(result))

    def end(self) -> None:
        """Let ``receive`` raise EngineDeadError, as if the engine's process had ended. Any thread
        may call this.
        """
        self._engine.end()

    def close(self) -> None:
        self._engine.close()
