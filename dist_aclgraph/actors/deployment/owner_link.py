"""An ingress sends questions to the owner of its deployment (the process that has started it), in
MessagePack over a Unix socket.

The owner and the ingress have the same supervisor. The supervisor owns the listening socket. If the
owner dies, the next owner uses the same socket. If the ingress gets no answer, it repeats the
question.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Literal, Protocol, TypeVar

import msgspec

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.actors.wire.sockets import read_frame
from dist_aclgraph.errors import NotAMessageError

T = TypeVar("T")

MAX_BYTES = 16 << 20  # maximum size of one message
WAITING = 64  # length of the listen queue; connections that have timed out stay in the queue
LOOK_S, LOOK_MS = 0.05, 500
CONNECT_S = 1.0
ADMISSION_S = 1.0  # seconds to wait for an answer that needs no call to Ray
# Seconds to wait for an answer if the owner must call Ray. The owner's calls to Ray have shorter
# time limits.
SEARCH_S = 30.0

logger = logging.getLogger(__name__)
encode = msgspec.msgpack.Encoder().encode


class Question(msgspec.Struct, frozen=True):
    """A question of an ingress. ``is_open`` says whether the ingress admits requests at present."""

    what: Literal["admission", "reach", "outlook"]
    is_open: bool = False


class Admission(msgspec.Struct, frozen=True):
    """Whether the ingress may admit requests.

    Attributes:
        end: why the ingress must admit no more requests; "" while it may admit requests.
        drain_s: how long the running requests may take to end, in seconds.
        restarts_left: the number of restarts that are still allowed within this hour, for each of
            the keys ``controller`` and ``owner``. A key is missing if its number is unknown.
    """

    end: str = ""
    drain_s: float = 0.0
    restarts_left: dict[str, int] = {}


class OwnerAnswers(Protocol):
    """The methods that answer the questions of an ingress. Any thread may call them."""

    def admission(self, is_open: bool) -> Admission: ...

    def reach(self) -> Reach | None:
        """Return the addresses at which clients reach the deployment; None while no engine can be
        reached.
        """
        ...

    def outlook(self) -> Outlook: ...


def listen_for_ingress(path: str) -> socket.socket:
    """Return a listening socket. All later owners of the deployment use the same socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(WAITING)
    listener.setblocking(False)
    return listener


class OwnerLink:
    """The side of the link in the deployment's owner, the process that has started the deployment.
    The object is a context manager. One thread serves each connection.

    Args:
        listener: a socket from ``listen_for_ingress``; the caller closes it.
    """

    def __init__(self, listener: socket.socket, answers: OwnerAnswers) -> None:
        self._listener = listener
        self._answers = answers
        self._lock = threading.Lock()
        self._num_linked = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="owner-link", daemon=True)

    def __enter__(self) -> OwnerLink:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def wait_until_left(self, seconds: float) -> bool:
        """Wait until no ingress is connected; return False if this takes longer than
        ``seconds``.
        """
        until_s = time.monotonic() + seconds
        while self._num_linked and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        return not self._num_linked

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._ended.is_set():
            if poll.poll(LOOK_MS):
                with contextlib.suppress(OSError):
                    accepted, _ = self._listener.accept()
                    accepted.setblocking(True)
                    peer = Connection(accepted.detach())
                    self._count(1)
                    threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Connection) -> None:
        decoder = msgspec.msgpack.Decoder(Question)
        try:
            with peer:
                while True:
                    peer.send_bytes(self._answer(read_frame(decoder, peer.recv_bytes(MAX_BYTES))))
        except (EOFError, OSError):
            pass  # the ingress has disconnected
        except NotAMessageError as e:
            logger.warning("%s", e)
        finally:
            self._count(-1)

    def _answer(self, question: Question) -> bytes:
        match question.what:
            case "admission":
                return encode(self._answers.admission(question.is_open))
            case "reach":
                return encode(self._answers.reach())
            case "outlook":
                return encode(self._answers.outlook())

    def _count(self, more: int) -> None:
        with self._lock:
            self._num_linked += more


class OwnerClient:
    """The ingress's side of the link to the deployment's owner. Only one thread may use this
    object. After the owner's death, this object connects to the next owner.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._peer: Connection | None = None

    def admission(self, *, is_open: bool) -> Admission | None:
        """Tell the owner whether this ingress admits requests. Return the owner's answer; None if
        the owner does not answer.
        """
        return self._ask(Question("admission", is_open), Admission, ADMISSION_S)

    def reach(self) -> Reach | None:
        """Return the addresses at which clients reach the deployment; None if the owner does not
        answer, or if no engine can be reached.
        """
        return self._ask(Question("reach"), Reach | None, SEARCH_S)  # type: ignore[arg-type]

    def outlook(self) -> Outlook:
        found = self._ask(Question("outlook"), Outlook, SEARCH_S)
        return found or Outlook(progress="the deployment is being started again")

    def close(self) -> None:
        """Disconnect. A question that waits for its answer fails. Thread-safe, idempotent."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def _ask(self, question: Question, kind: type[T], limit_s: float) -> T | None:
        """Return the answer; None if no answer arrived in time."""
        try:
            peer = self._peer = self._peer or self._connect()
            peer.send_bytes(encode(question))
            if peer.poll(limit_s):
                frame = peer.recv_bytes(MAX_BYTES)
                return read_frame(msgspec.msgpack.Decoder(kind), frame)
        except (EOFError, OSError, NotAMessageError) as e:
            logger.debug("the owner of the deployment does not answer: %s", e)
        self.close()  # otherwise a late answer would be read as the answer to the next question
        return None

    def _connect(self) -> Connection:
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(CONNECT_S)  # while there is no owner, no process accepts connections
            opened.connect(self._path)
            opened.settimeout(None)
        except OSError:
            opened.close()
            raise
        return Connection(opened.detach())
