"""A client's side of the link to one engine. Only the client's I/O thread uses this link."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, get_args

import zmq
from zmq.utils.monitor import recv_monitor_message

from dist_aclgraph.actors.host.liveness import Silence
from dist_aclgraph.actors.wire.addresses import Endpoint
from dist_aclgraph.actors.wire.context import Context
from dist_aclgraph.actors.wire.messages import (
    ClientBeat,
    Deltas,
    EngineStatus,
    GroupList,
    Hello,
    QueryAnswer,
    Refused,
    ToEngine,
    encoder,
    from_engine_decoder,
)
from dist_aclgraph.actors.wire.sockets import MAX_MESSAGE_BYTES, has_message, read_frame
from dist_aclgraph.errors import EngineDeadError, NotAMessageError

# Maximum number of frames read at once, so that many tokens do not delay a heartbeat.
FRAMES_A_TURN = 256
LAST_WORDS_MS = 100
# The reason why a link is lost. gone: the engine's process has ended. silent: the engine has sent
# no heartbeat for too long. failed: the engine reports the end of its group. refused: the engine
# refuses the client. broken: the engine has sent invalid frames.
LossKind = Literal["gone", "silent", "failed", "refused", "broken"]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class EngineLink:
    """One connection. After an error, close the connection and open another one.

    Args:
        link_s: time limit in seconds. An engine that is silent for longer counts as dead.

    Attributes:
        is_welcome: whether the engine has answered on this connection that it accepts requests.
        is_lost: whether this connection has ended. The caller that catches the error sets this
            attribute.
        loss_kind: the reason why the connection was lost. ``receive`` and ``beat`` set this
            attribute before they raise an error.
        others_tokens: the load of other clients at the engine, from the engine's last status; see
            ``EngineStatus``.
        pause: the reason why the engine's group has paused, from the engine's last status; "" while
            steps run.
    """

    def __init__(
        self,
        context: Context,
        endpoint: Endpoint,
        hello: Hello,
        link_s: float,
    ) -> None:
        self.is_welcome = False
        self.is_lost = False
        self.loss_kind: LossKind = "failed"
        self.others_tokens = 0
        self.pause = ""
        self._received = 0
        self._silence = Silence(link_s)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # The send queue has no limit. A full queue would drop messages or block the thread. The
        # limited number of open requests also limits the queue.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSALS)
        endpoint.connect(self._socket)
        self.send(hello)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return self._socket, self._monitor

    def send(self, message: ToEngine) -> None:
        """Send a message. If the connection has ended, drop the message; ``receive`` will raise the
        error.
        """
        # The send queue is never full. So ``Again`` means that ZeroMQ has dropped the connection,
        # e.g. after a failed handshake.
        with contextlib.suppress(zmq.Again):
            self._socket.send(encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[Deltas | QueryAnswer | GroupList]:
        """Yield the messages that the engine has sent.

        Raises:
            EngineDeadError: the link is lost; the message says why.
        """
        for _ in range(FRAMES_A_TURN):
            if not has_message(self._socket):
                break
            try:
                message = read_frame(from_engine_decoder, self._socket.recv())
            except NotAMessageError as e:
                raise self._lost("broken", f"the engine has sent junk: {e}") from None
            self._silence.heard()
            if isinstance(message, Refused):
                raise self._lost("refused", f"the engine refused the connection: {message.reason}")
            if isinstance(message, EngineStatus):
                if message.failure:
                    raise self._lost("failed", message.failure)
                self.is_welcome = True
                self.others_tokens = message.others_tokens
                self.pause = message.pause
                continue
            if isinstance(message, Deltas):
                if message.number != self._received + 1:
                    raise self._lost(
                        "broken",
                        f"message {message.number} of the engine came after {self._received}: "
                        "what is between them is lost",
                    )
                self._received = message.number
                self._check(message)
            yield message
        else:
            # All messages that have arrived are yielded before the check whether the connection has
            # ended.
            return
        if has_message(self._monitor):
            if recv_monitor_message(self._monitor)["event"] & REFUSALS:
                raise self._lost(
                    "refused",
                    "the engine refused the connection: the keys are not those of its deployment, "
                    "or it was just ending",
                )
            raise self._lost("gone", "the connection to the engine has ended: its process is gone")

    def beat(self, waiting_tokens: int, groups_version: int) -> None:
        """Send a heartbeat (``ClientBeat``), and check for how long the engine has been silent.

        Raises:
            EngineDeadError: the engine has been silent for too long.
        """
        if self.is_lost:
            return
        if not has_message(self._socket) and self._silence.listen():
            silent_s = self._silence.silent_s
            raise self._lost("silent", f"the engine has been silent for {silent_s:.1f} s")
        if self.is_welcome:  # the engine has answered Hello
            self.send(ClientBeat(self._received, waiting_tokens, groups_version))

    def close(self, linger_ms: int = LAST_WORDS_MS) -> None:
        """End the connection. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _check(self, message: Deltas) -> None:
        try:
            message.step.check_columns()
        except NotAMessageError as e:
            raise self._lost("broken", f"the engine has sent junk: {e}") from None

    def _lost(self, kind: LossKind, reason: str) -> EngineDeadError:
        self.loss_kind = kind
        return EngineDeadError(reason)
