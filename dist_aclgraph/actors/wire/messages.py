"""The messages between an engine (ZeroMQ's ROUTER socket) and its clients (DEALER sockets).

Messages are plain MessagePack, like the messages between engine and workers (``steps/step.py``).
Each message is one frame. A client sends ``Hello`` first, and ``ClientBeat`` regularly. The engine
replies to each of these messages with an ``EngineStatus``. If the token is wrong, the engine
replies with ``Refused``. The engine ignores a peer that has not sent ``Hello``. After ``Hello``,
and whenever the groups change, the engine sends the ``GroupList``. If a link fails, the engine
aborts the requests of this link. The client sends these requests to another engine, or ends them
with an error.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from dist_aclgraph import errors
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.steps.delta import RequestDelta, StepDeltas
from dist_aclgraph.steps.step import RowSampling

RequestNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
QueryKind = Literal["report", "metrics"]
# Maximum number of bytes that a client may leave unconfirmed. If a client leaves more bytes
# unconfirmed, the engine assumes that the client does not read.
MAX_UNREAD_BYTES = 128 << 20


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message on a connection. The engine ends an earlier connection of the client."""

    token: str
    client: str
    protocol: str = ""  # hash of all messages, see ``protocol``; old clients send ""


class ClientBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A client's heartbeat.

    Attributes:
        received: number of the last ``Deltas`` that the client has read.
        waiting_tokens: the load of the client's requests on this engine. The load is the number of
            prompt tokens that are not computed yet, plus a fixed number for each request
            (``RequestRouter.load``).
        groups_version: version of the last ``GroupList`` that the client has read. The client
            routes all later requests by this list.
    """

    received: int = 0
    waiting_tokens: Tokens = 0
    groups_version: int = 0


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The client disconnects, so its requests are aborted."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request. ``sampling.seed`` is final: the client draws a seed if the user gives none.

    Deltas identify the request by ``number``. While the request runs, no other request of the
    connection has the same number.
    """

    request_id: str
    number: RequestNumber
    # int32 [num_tokens]: the prompt, followed by the tokens that other engines have already
    # generated
    prompt: bytes
    sampling: RowSampling
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    # Whether another group or service continues the request. If True, the engine first writes the
    # prompt's KV to files, and then reports the end of the request.
    hands_over: bool = False
    source: str = ""  # name of the group that has computed the prompt for this group
    peer: BlockSource | None = None  # the group of another service that has computed the prompt


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request, and free its resources. Unknown ids are ignored."""

    request_id: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """A client's question to the engine. The answer repeats the question's id."""

    query_id: int
    what: QueryKind


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """The deltas of one step for all requests of one client.

    ``number`` counts the ``Deltas`` of a connection from 1, so a gap shows that tokens are lost.
    """

    step: StepDeltas
    number: int


class EngineStatus(msgspec.Struct, frozen=True, tag="status"):
    """The engine's heartbeat, and its reply to a client's heartbeat.

    Attributes:
        failure: why the engine has ended; "" while it serves.
        pause: the reason for the group's present pause; "" while steps run.
        others_tokens: the sum of ``ClientBeat.waiting_tokens`` of all clients of this engine,
            except the client that receives this message.
    """

    failure: str = ""
    others_tokens: Tokens = 0
    pause: str = ""


class GroupEntry(msgspec.Struct, frozen=True):
    """The facts about a lockstep group that clients get.

    Attributes:
        name: a number that no other group of the deployment ever has.
        address: address of the group's engine.
        cache_blocks: number of KV blocks, summed over the group's data-parallel ranks.
        tokens_per_block: number of tokens in each KV block.
        is_draining: whether the group accepts no new requests.
        prefill_from: this group computes a prompt for another group only if the prompt has at least
            this number of uncached tokens; 0 if this group is no prefill group.
        blocks: the source from which other groups or services fetch the KV of prompts; None if
            nothing is fetched from this group.
    """

    name: str
    address: Address
    cache_blocks: int
    tokens_per_block: int
    is_draining: bool = False
    prefill_from: int = 0
    blocks: BlockSource | None = None


class GroupList(msgspec.Struct, frozen=True, tag="groups"):
    """All groups of the deployment. Every engine sends this list. Clients use the list with the
    highest version.

    A group that is not in the list gets no new requests, but continues its running requests.
    """

    version: int
    groups: tuple[GroupEntry, ...]


class QueryAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to a query: a JSON object."""

    query_id: int
    body: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine refuses the client, or stops serving the client.

    This is the last message to the client.
    """

    reason: str


ToEngine = Hello | ClientBeat | Submit | Abort | Query | Goodbye
FromEngine = Deltas | EngineStatus | GroupList | QueryAnswer | Refused


@cache
def protocol() -> str:
    """Return a hash of all messages. An engine accepts only clients with the same hash."""
    schema = msgspec.json.schema(ToEngine | FromEngine)
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()[:12]


encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def answer(query: Query, body: dict[str, Any]) -> QueryAnswer:
    return QueryAnswer(query.query_id, json.dumps(body).encode())


def failed(request_id: str, error: errors.DistAclGraphError) -> RequestDelta:
    """Return the last delta of a request that ends with ``error``."""
    return RequestDelta(
        request_id, finish_reason="error", error=str(error), error_kind=type(error).__name__
    )


def error_of(delta: RequestDelta) -> errors.DistAclGraphError:
    """Return the typed error that a failed request's last delta describes."""
    kind = getattr(errors, delta.error_kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DistAclGraphError)):
        kind = errors.DistAclGraphError
    return kind(delta.error or "the request failed")
