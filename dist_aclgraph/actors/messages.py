"""What crosses between an engine and its clients, over one ZeroMQ ROUTER (engine) / DEALER pair.

Plain MessagePack, as between engine and workers (``steps/step.py``); each message is one frame.
A client says ``Hello`` first: an engine answers ``Refused`` to a wrong token and ignores all else.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from dist_aclgraph import errors
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowSampling

MAX_MESSAGE_BYTES = 64 << 20
QueryKind = Literal["report", "metrics", "health"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client, repeated after a silence; ``epoch`` counts the repetitions."""

    token: str
    epoch: int = 0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A new request. ``sampling.seed`` is final: who submits has drawn one where none was given."""

    request_id: str
    prompt: bytes  # int32 [num_prompt_tokens]
    sampling: RowSampling
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # cached blocks are shared with requests of the same salt only


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free what it holds; unknown ids are ignored."""

    request_id: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """A question; ``health`` is also the heartbeat."""

    query_id: int
    what: QueryKind


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """One message per step for all requests of one client."""

    deltas: tuple[RequestDelta, ...]
    epoch: int = 0
    step: int = 0  # the last that the engine had scheduled


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to a query: a JSON object."""

    query_id: int
    body: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine does not serve this client."""

    reason: str


ToEngine = Hello | Submit | Abort | Query
FromEngine = Deltas | Answer | Refused

encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def answer(query: Query, body: dict[str, Any]) -> Answer:
    return Answer(query.query_id, json.dumps(body).encode())


def error_of(delta: RequestDelta) -> errors.DistAclGraphError:
    """Return the typed error that a failed request's last delta describes."""
    kind = getattr(errors, delta.error_kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DistAclGraphError)):
        kind = errors.DistAclGraphError
    return kind(delta.error or "the request failed")
