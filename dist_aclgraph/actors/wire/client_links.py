"""The engine's side of the links to its clients, on one I/O thread that never runs a step.

The thread reads the clients' messages, answers the clients' heartbeats even while a step runs, and
numbers the ``Deltas`` of each link. A link ends in five cases: its client sends ``Goodbye``,
connects again, sends invalid frames, is silent for too long, or stops reading. When a link ends,
the loop gets an event, and aborts the requests of this link.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from typing import Any, Protocol

import zmq

from dist_aclgraph.actors.host.liveness import Silence, beat_s
from dist_aclgraph.actors.wire.addresses import Listener, Place
from dist_aclgraph.actors.wire.context import make_context
from dist_aclgraph.actors.wire.messages import (
    MAX_UNREAD_BYTES,
    Abort,
    ClientBeat,
    Deltas,
    EngineStatus,
    FromEngine,
    Goodbye,
    GroupList,
    Hello,
    Query,
    Refused,
    Submit,
    ToEngine,
    answer,
    encoder,
    protocol,
    to_engine_decoder,
)
from dist_aclgraph.actors.wire.sockets import Wakeup, has_message, read_frame
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.steps.delta import StepDeltas

# Maximum number of unread frames of one peer. This limit matters only for peers that are not
# clients. A client reaches ``max_unread_bytes`` first.
MAX_QUEUED_FRAMES = 1 << 16
# Maximum number of frames read at once, so that many frames do not delay a heartbeat.
FRAMES_A_TURN = 256
LAST_WORDS_MS = 200
UNHELD_S = 0.01  # seconds between two checks of the lease, while the engine must not answer


class LoopAnswers(Protocol):
    """Gives the I/O thread the state of the engine's loop. Any thread may call all methods."""

    def failure_now(self) -> str:
        """Return why the group has ended; "" while it serves."""
        ...

    def pause_now(self) -> str:
        """Return the reason for the group's present pause; "" while steps run."""
        ...

    def is_held(self) -> bool:
        """Return whether the engine holds its lease. Without the lease, the engine answers no
        client.
        """
        ...

    def report(self) -> dict[str, Any]: ...

    def metrics(self) -> dict[str, Any]: ...


class ClientLink:
    """One connection of one client. Only the I/O thread uses its attributes.

    Attributes:
        unread: one pair for each message that the client has not confirmed: the message's number,
            and its size in bytes.
        waiting_tokens: the load that the client last reported; see ``ClientBeat``.
        groups_version: version of the group list that the client uses.
    """

    def __init__(self, routing_id: bytes, client: str, silence: Silence) -> None:
        self.routing_id = routing_id
        self.client = client
        self.silence = silence
        self.number = 0
        self.unread: deque[tuple[int, int]] = deque()
        self.unread_bytes = 0
        self.waiting_tokens = 0
        self.groups_version = 0

    def book(self, num_bytes: int) -> None:
        self.unread.append((self.number, num_bytes))
        self.unread_bytes += num_bytes

    def confirm(self, number: int) -> None:
        while self.unread and self.unread[0][0] <= number:
            self.unread_bytes -= self.unread.popleft()[1]


# An event with None instead of a message means that the link has ended, so all requests of the link
# end.
ClientEvent = tuple[ClientLink, Submit | Abort | None]


class ClientLinks:
    """Owns the clients' socket and the I/O thread.

    Args:
        place: the address and ports at which the socket listens.
        token: the deployment's token, which clients must send.
        link_s: time limit in seconds; a client that is silent for longer is lost.
        max_unread_bytes: maximum number of bytes that a client may leave unread. A client that
            leaves more bytes unread is disconnected.

    Attributes:
        address: the address to which clients connect.

    Raises:
        PlacementError: no port is free.
    """

    def __init__(
        self, place: Place, token: str, link_s: float, max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self._token = token
        self._link_s = link_s
        self._beat_s = beat_s(link_s)
        self._max_unread_bytes = max_unread_bytes
        self._context = make_context()
        self._socket = self._context.socket(zmq.ROUTER)
        # With this option, a frame that cannot be sent raises an error; by default, ZeroMQ drops
        # such a frame silently.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        self._listener = Listener(self._context, place)
        self.address = self._listener.bind(self._socket, "clients")
        self._links: dict[bytes, ClientLink] = {}
        self._events: queue.SimpleQueue[ClientEvent] = queue.SimpleQueue()
        self._outgoing: deque[tuple[ClientLink, StepDeltas]] = deque()
        self._wakeup = Wakeup()
        self._closing = threading.Event()
        self._told = "", ""  # the failure and the pause that were last sent to clients
        self._setting = threading.Lock()
        self._groups = GroupList(0, ())
        self._told_groups = self._groups
        self._thread: threading.Thread | None = None

    # ---- the loop's thread

    def start(self, answers: LoopAnswers) -> None:
        """Start the I/O thread, which serves the clients."""
        self._thread = threading.Thread(
            target=self._run, args=(answers,), name="client-links", daemon=True
        )
        self._thread.start()

    def next_events(self, timeout_s: float) -> list[ClientEvent]:
        """Return the clients' events; wait up to ``timeout_s`` for the first event."""
        events: list[ClientEvent] = []
        try:
            events.append(self._events.get(timeout_s > 0, timeout_s or None))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def send(self, link: ClientLink, deltas: StepDeltas) -> None:
        """Send deltas in the order of the calls. Deltas for a link that has ended are dropped."""
        self._outgoing.append((link, deltas))
        self._wakeup.wake()

    def wake(self) -> None:
        """Wake the I/O thread, so that it sends a new failure to clients at once."""
        self._wakeup.wake()

    def set_groups(self, groups: GroupList) -> None:
        """Send the list of groups to all clients. Any thread may call this.

        Calls can arrive in any order. Of all lists, the list with the highest version is used.
        """
        with self._setting:
            self._groups = max(self._groups, groups, key=lambda g: g.version)
        self._wakeup.wake()

    def have_confirmed(self, version: int) -> bool:
        """Return whether all clients use this version of the list or a later version. Thread-safe.

        If the result is True, the loop's queue of events contains all requests that clients routed
        with earlier versions of the list.
        """
        return all(link.groups_version >= version for link in list(self._links.values()))

    def close(self) -> None:
        """Send all queued deltas, and end the thread."""
        self._closing.set()
        self._wakeup.wake()
        if self._thread is not None:
            self._thread.join()
        self._socket.close(linger=LAST_WORDS_MS)
        self._listener.close()
        self._context.term()
        self._wakeup.close()

    # ---- the I/O thread

    def _run(self, answers: LoopAnswers) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        while not self._closing.is_set():
            poller.poll(int(self._beat_s * 1000))
            self._wakeup.drain()
            if not answers.is_held():
                self._closing.wait(UNHELD_S)
                continue
            is_drained = self._receive(answers)
            self._send_deltas()
            self._tell(answers.failure_now(), answers.pause_now())
            self._tell_groups()
            if is_drained:
                self._look_for_silence()
        self._send_deltas()

    def _receive(self, answers: LoopAnswers) -> bool:
        """Read frames from the socket. Return whether the socket has no more frames."""
        for _ in range(FRAMES_A_TURN):
            if not has_message(self._socket):
                return True
            routing_id, *frames = self._socket.recv_multipart()
            try:
                message = read_frame(to_engine_decoder, b"".join(frames))
            except NotAMessageError as e:
                if (link := self._links.get(routing_id)) is not None:
                    self._cut(link, str(e))
                continue
            self._serve(routing_id, message, answers)
        return False

    def _serve(self, routing_id: bytes, message: ToEngine, answers: LoopAnswers) -> None:
        if isinstance(message, Hello):
            self._welcome(routing_id, message)
            return
        link = self._links.get(routing_id)
        if link is None:
            return
        link.silence.heard()
        if isinstance(message, Submit | Abort):
            self._events.put((link, message))
        elif isinstance(message, ClientBeat):
            link.confirm(message.received)
            link.waiting_tokens = message.waiting_tokens
            link.groups_version = message.groups_version
            self._post(link, self._status(link))
        elif isinstance(message, Query):
            ask = answers.report if message.what == "report" else answers.metrics
            self._post(link, answer(message, ask()))
        elif isinstance(message, Goodbye):
            self._end(link)

    def _welcome(self, routing_id: bytes, hello: Hello) -> None:
        if not secrets.compare_digest(hello.token.encode(), self._token.encode()):
            self._write(routing_id, encoder.encode(Refused("wrong token")))
            return
        if hello.protocol != protocol():
            why = "another version of dist_aclgraph, whose messages differ; start it again"
            self._write(routing_id, encoder.encode(Refused(f"the client runs {why}")))
            return
        for link in list(self._links.values()):
            if link.client == hello.client or link.routing_id == routing_id:
                self._end(link)
        link = ClientLink(routing_id, hello.client, Silence(self._link_s))
        self._links[routing_id] = link
        # Send the list before the status. A client that has received the status may send requests.
        # The list tells the client which groups are draining and must get no requests.
        if self._told_groups.version:
            self._post(link, self._told_groups)
        self._post(link, self._status(link))

    def _status(self, link: ClientLink) -> EngineStatus:
        failure, pause = self._told
        return EngineStatus(failure, self._others_tokens(link), pause)

    def _others_tokens(self, link: ClientLink) -> int:
        return sum(other.waiting_tokens for other in self._links.values() if other is not link)

    def _send_deltas(self) -> None:
        while self._outgoing:
            link, deltas = self._outgoing.popleft()
            if self._links.get(link.routing_id) is not link:
                continue
            link.number += 1
            frame = encoder.encode(Deltas(deltas, link.number))
            link.book(len(frame))
            if link.unread_bytes > self._max_unread_bytes:
                self._cut(link, f"the client has left {link.unread_bytes} bytes unread")
            elif not self._write(link.routing_id, frame):
                self._cut(link, f"the client has left {len(link.unread)} messages unread")

    def _tell(self, failure: str, pause: str) -> None:
        if (failure, pause) != self._told:
            self._told = failure, pause
            for link in list(self._links.values()):
                self._post(link, self._status(link))

    def _tell_groups(self) -> None:
        groups = self._groups
        if groups is not self._told_groups:
            self._told_groups = groups
            for link in list(self._links.values()):
                self._post(link, groups)

    def _look_for_silence(self) -> None:
        for link in list(self._links.values()):
            if link.silence.listen():
                self._cut(link, f"the client was silent for {link.silence.silent_s:.1f} s")

    def _cut(self, link: ClientLink, reason: str) -> None:
        self._end(link)
        self._write(link.routing_id, encoder.encode(Refused(reason)))

    def _end(self, link: ClientLink) -> None:
        if self._links.get(link.routing_id) is link:
            del self._links[link.routing_id]
            self._events.put((link, None))

    def _post(self, link: ClientLink, message: FromEngine) -> None:
        if not self._write(link.routing_id, encoder.encode(message)):
            self._end(link)

    def _write(self, routing_id: bytes, frame: bytes) -> bool:
        """Send a frame; return whether the peer accepted it."""
        try:
            self._socket.send_multipart([routing_id, frame], zmq.NOBLOCK)
        except zmq.ZMQError:  # the peer has disconnected (EHOSTUNREACH), or does not read (EAGAIN)
            return False
        return True
