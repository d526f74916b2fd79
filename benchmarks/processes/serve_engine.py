"""The sources of tokens for the servers of ``make bench-serve``. In each step, a source sends one
token to each stream.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.wire.addresses import Address, Place, Reach
from dist_aclgraph.actors.wire.client_links import ClientLink, ClientLinks
from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.steps.delta import Note, StepDeltas

NODE, TOKEN = "node", "a-token-of-this-bench"
LINK_S = 10.0
TAKE_S = 0.1


class Source(Protocol):
    """Produces the tokens of a server's streams."""

    def wait_for(self, num_streams: int) -> None:
        """Wait until this number of streams is open."""
        ...

    def step(self, token_id: int, *, is_last: bool) -> None: ...


class PacedEngine:
    """An engine with the usual links to clients, but without a model. The bench provides each
    token.
    """

    def __init__(self, directory: Path) -> None:
        self._links = ClientLinks(Place(NODE, str(directory)), TOKEN, LINK_S)
        self._links.start(self)
        self._numbers: dict[ClientLink, list[int]] = {}

    @property
    def address(self) -> Address:
        return self._links.address

    def wait_for(self, num_streams: int) -> None:
        while sum(map(len, self._numbers.values())) < num_streams:
            for link, wish in self._links.next_events(TAKE_S):
                if isinstance(wish, Submit):
                    self._numbers.setdefault(link, []).append(wish.number)

    def step(self, token_id: int, *, is_last: bool) -> None:
        for link, numbers in self._numbers.items():
            notes = (
                tuple(Note(i, finish_reason="length") for i in range(len(numbers)))
                if is_last
                else ()
            )
            tokens = pack_ints([token_id] * len(numbers))
            self._links.send(link, StepDeltas(pack_ints(numbers), tokens, notes=notes))
        if is_last:
            self._numbers.clear()

    def close(self) -> None:
        self._links.close()

    # ---- messages of the links

    def failure_now(self) -> str:
        return ""

    def pause_now(self) -> str:
        return ""

    def is_held(self) -> bool:
        return True

    def report(self) -> dict[str, Any]:
        return {}

    def metrics(self) -> dict[str, Any]:
        return {}


class ByteSource:
    """The source for the floor (a bare uvicorn). At each step, the source sends one byte to the
    server. For each new stream, the source receives one byte from the server.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait_for(self, num_streams: int) -> None:
        opened = 0
        while opened < num_streams:
            opened += len(self._connection.recv(num_streams - opened))

    def step(self, token_id: int, *, is_last: bool) -> None:
        self._connection.send(b"\0")


@dataclass
class PacedDeployment:
    """A deployment that consists of one paced engine. The engine runs in another process."""

    address: Address
    max_model_len: int
    node_id: str = NODE

    def reach(self) -> Reach:
        return Reach([self.address], TOKEN, self.max_model_len, self.node_id)

    def report(self) -> dict[str, Any]:
        return {}

    def raise_if_dead(self) -> None:
        """Do nothing, because the engine lives as long as the bench."""

    def outlook(self) -> Outlook:
        return Outlook(failure="the bench is over")

    def restarts_left(self) -> int:
        return 0

    def shut_down(self) -> None:
        """Do nothing, because the bench itself ends its engine."""
