"""The hot path between an engine and its workers: plans out to all, results back from all.

ZeroMQ PUB/SUB for plans and PUSH/PULL for results, MessagePack inside: on one node over a socket
file in a directory that only this user may enter, across nodes over TCP with CURVE, whose keys
travel through Ray. Every message carries epoch and step; stale ones are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from dist_aclgraph.errors import WorkerLostError, WorkerStartTimeoutError
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.steps.step import (
    FromWorker,
    Shutdown,
    StepPlan,
    StepResult,
    ToWorker,
    encoder,
    from_worker_decoder,
    to_worker_decoder,
)

MAX_MESSAGE_BYTES = 64 << 20
POLL_MS = 100  # how often a wait looks whether it should end


@dataclass(frozen=True)
class ChannelAddress:
    """Where workers find their engine.

    Attributes:
        plans, results: ZeroMQ endpoints.
        server_key, client_public, client_secret: CURVE keys, empty for socket files.
    """

    plans: str
    results: str
    server_key: bytes = b""
    client_public: bytes = b""
    client_secret: bytes = b""


class Deadline:
    """A limit for several waits together."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.at_s = time.monotonic() + timeout_s


class StepSender:
    """The engine's end. Owns both sockets."""

    def __init__(self, num_workers: int, directory: str | None, host: str = "127.0.0.1") -> None:
        """Bind.

        Args:
            directory: where socket files go; None uses TCP on ``host``.
        """
        self._num_workers = num_workers
        self._context = zmq.Context(io_threads=1)
        self._plans = self._context.socket(zmq.XPUB)
        # Verbose: equal subscriptions of several workers are several messages, so they count.
        self._plans.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._results = self._context.socket(zmq.PULL)
        sockets = (self._plans, self._results)
        for socket in sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if directory is not None:
            self.address = ChannelAddress(f"ipc://{directory}/plans", f"ipc://{directory}/results")
            self._plans.bind(self.address.plans)
            self._results.bind(self.address.results)
            return
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        for socket in sockets:
            socket.curve_server = True
            socket.curve_secretkey = server_secret
            socket.curve_publickey = server_public
        ports = [socket.bind_to_random_port(f"tcp://{host}") for socket in sockets]
        self.address = ChannelAddress(
            f"tcp://{host}:{ports[0]}",
            f"tcp://{host}:{ports[1]}",
            server_public,
            client_public,
            client_secret,
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
        results: dict[int, StepResult] = {}
        deadline = Deadline(timeout_s)
        while len(results) < self._num_workers:
            result = self._next(f"step {plan.step}", set(results), deadline, check)
            if not isinstance(result, StepResult) or result.step != plan.step:
                continue
            if result.epoch != plan.epoch:
                continue
            if result.error:
                raise WorkerLostError(result.error, result.rank, "SERVING")
            results[result.rank] = result
        return list(results.values())

    def receive_votes(
        self, command: GraphCommand, timeout_s: float, check: Callable[[], None]
    ) -> list[GraphAnswer]:
        """Return the answers to ``command`` from all workers, in rank order.

        Raises:
            WorkerLostError: a worker did not answer in time; names the rank.
        """
        votes: dict[int, GraphAnswer] = {}
        deadline = Deadline(timeout_s)
        while len(votes) < self._num_workers:
            vote = self._next(f"'{command}'", set(votes), deadline, check)
            if not isinstance(vote, GraphAnswer) or vote.number != command.number:
                continue
            if vote.epoch == command.epoch:
                votes[vote.rank] = vote
        return [votes[rank] for rank in sorted(votes)]

    def _next(
        self, what: str, answered: set[int], deadline: Deadline, check: Callable[[], None]
    ) -> FromWorker:
        while not self._results.poll(POLL_MS):
            check()
            if time.monotonic() > deadline.at_s:
                missing = sorted(set(range(self._num_workers)) - answered)
                ranks = ", ".join(str(rank) for rank in missing)
                raise WorkerLostError(
                    f"{what} was not answered by rank {ranks} within {deadline.timeout_s:g} s",
                    missing[0],
                    "SERVING",
                )
        return from_worker_decoder.decode(self._results.recv())

    def close(self, epoch: int) -> None:
        """Tell workers to leave their loop, and close the sockets."""
        try:
            self.send(Shutdown(epoch))
        finally:
            # The farewell gets a moment; a dead worker must not hold us.
            self._plans.close(linger=200)
            self._results.close(linger=0)
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
            if address.server_key:
                socket.curve_serverkey = address.server_key
                socket.curve_publickey = address.client_public
                socket.curve_secretkey = address.client_secret
        self._results.connect(address.results)
        self._plans.setsockopt(zmq.SUBSCRIBE, b"")
        self._plans.connect(address.plans)

    def has_message(self) -> bool:
        """Say whether ``receive`` would find a message."""
        return bool(int(self._plans.get(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self, epoch: int) -> StepPlan | GraphCommand | None:
        """Return the next plan or command of ``epoch``, or None when the engine shuts down.

        Raises:
            msgspec.ValidationError: the message is not one of ours.
        """
        while True:
            message = to_worker_decoder.decode(self._plans.recv())
            if message.epoch == epoch:
                return None if isinstance(message, Shutdown) else message

    def send(self, result: FromWorker) -> None:
        self._results.send(encoder.encode(result))

    def close(self) -> None:
        self._plans.close()
        self._results.close()
        self._context.term()
