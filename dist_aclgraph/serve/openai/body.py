"""Reads request bodies within limits, and decodes them into typed structs. Errors are 4xx.

msgspec checks types while it decodes, and stops at the first error, so nothing is built from
invalid input. A number may also be written as a text. An integer may also be written as a float
without a fraction. A boolean may also be 0 or 1, or one of the texts true, false, 1 and 0. A field
that may have any number of items is first decoded as ``Raw``: its JSON text is scanned, but no
items are built. The items of such a field are counted before they are built (``types``).

Unknown fields of the body and of its parts are ignored; with ``serve.strict``, they are refused. A
field in ``NOT_OFFERED`` is always refused, because a client would believe that the field has an
effect.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import Raw
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import InvalidParameterError, QueueFullError
from dist_aclgraph.serve.openai.errors import BodyTimeoutError, BodyTooLargeError

B = TypeVar("B", bound="Body")
R = TypeVar("R")
log = logging.getLogger(__name__)
# Larger bodies are decoded on a thread. For smaller bodies, a change of threads takes longer than
# the decoding.
MAX_INLINE_BYTES = 32 << 10
MAX_SHOWN_CHARS = 200
# default of a field whose JSON text is decoded later
ABSENT: Raw = msgspec.field(default_factory=Raw)
# item of the ASGI scope with the paths of the ignored fields
IGNORED = "dist_aclgraph.ignored"
# Maximum number of ignored fields of one request, because their names are written into the log.
MAX_IGNORED = 16
# If a body has more strings or more objects than this number, its ignored fields are not collected.
MAX_STRINGS = 1 << 14
NOT_OFFERED = frozenset(
    {
        "audio",
        "beam_width",
        "function_call",
        "functions",
        "grammar",
        "images",
        "logits_processors",
        "lora_path",
        "n_probs",
        "prompt_embeds",
        "use_beam_search",
        "web_search_options",
    }
)
_NOTHING = (b"null", b"false", b"[]", b"{}", b'""', b"0", b'"none"', b'"auto"')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# One thread only, so that several large bodies do not take the CPU time of the event loop.
_decoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode-body")
_INDEX = re.compile(r"\[\d+\]")  # the index of an item, in the path of an ignored field
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
# Matches the escape of one half of a surrogate pair, without the other half.
_UNPAIRED = re.compile(
    rb"\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f][0-9a-f]{2}",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")


class BodyBudget:
    """Counts the bytes of all request bodies and journals in memory. Only one event loop may use
    this object.

    Journals get at most half of the limit, so that the other half is free for request bodies.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def check_room(self) -> None:
        """Check that a connection may read the next piece of a body.

        Raises:
            QueueFullError: more bytes than the limit are in memory. Each connection may exceed the
                limit by one piece, because a piece is counted after the read.
        """
        if self.num_bytes > self.max_bytes:
            raise QueueFullError(
                f"the bodies of requests in progress take more than {self.max_bytes >> 20} MiB; "
                "try again later"
            )

    def take(self, num_bytes: int) -> bool:
        """Count more bytes of a journal, and return True. If the limit would be exceeded, count
        nothing, and return False.
        """
        has_room = self.num_bytes + num_bytes <= self.max_bytes // 2
        if has_room:
            self.num_bytes += num_bytes
        return has_room

    def give_back(self, num_bytes: int) -> None:
        """Subtract the number of freed bytes from the count."""
        self.num_bytes -= num_bytes


class HeldBody:
    """The ASGI ``receive`` of one request. It adds the bytes of the request's body to the budget's
    count.

    Args:
        copies: number of copies of each byte in memory.
        is_owed: whether a previous process has accepted the request. If true, the request's bytes
            are counted, but the request is never refused.
    """

    def __init__(self, budget: BodyBudget, receive: Receive, *, copies: int, is_owed: bool) -> None:
        self._budget = budget
        self._receive = receive
        self._copies = copies
        self._is_owed = is_owed
        self._num_bytes = 0
        self._has_more = True

    async def __call__(self) -> Message:
        if self._has_more and not self._is_owed:
            self._budget.check_room()
        message = await self._receive()
        self._has_more = message.get("more_body", False)
        num_bytes = self._copies * len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._budget.num_bytes += num_bytes
        return message

    def release(self) -> None:
        """Subtract the request's bytes from the budget's count. Idempotent."""
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0


class Body(msgspec.Struct, kw_only=True, gc=False):
    """Base class of request bodies and their parts. The function ``strict`` returns a subclass that
    refuses unknown fields.

    Attributes:
        PARTS: for each field that is decoded later, the class of the field's value. For a list, the
            class of the list's items.
    """

    PARTS: ClassVar[Mapping[str, type[Body]]] = {}

    def check_fields(self) -> None:
        """Raise an error for a value that the types allow, but that the service does not support.

        Raises:
            InvalidParameterError: names the field.
        """

    def kind_of_part(self, kind: type[B]) -> type[B]:
        """Return the class for decoding a part. It is strict if this body's class is strict."""
        return strict(kind) if self.is_strict else kind

    @property
    def is_strict(self) -> bool:
        return bool(self.__struct_config__.forbid_unknown_fields)


@cache
def strict(kind: type[B]) -> type[B]:
    """Return a subclass whose decoding refuses unknown fields."""
    found = msgspec.defstruct(
        kind.__name__, [], bases=(kind,), forbid_unknown_fields=True, kw_only=True, gc=False
    )
    return cast("type[B]", found)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=False)


async def _receive_in_time(request: Request, config: ServeConfig) -> bytes:
    try:
        async with asyncio.timeout(config.body_s):
            return await _receive(request, config.max_body_bytes)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the request body did not arrive within {config.body_s:g} s"
        ) from None
    except ClientDisconnect:
        raise InvalidParameterError("the request body is incomplete") from None


async def read_body(
    request: Request, kind: type[B], convert: Callable[[B], R], config: ServeConfig
) -> R:
    """Read, decode and check the body; return ``convert(body)``.

    Args:
        convert: a function that converts the body; called on another thread if the body is large.

    Raises:
        BodyTooLargeError: the body is longer than ``serve.max_body_bytes``.
        BodyTimeoutError: the body did not arrive in time.
        InvalidParameterError: the body is incomplete, is not JSON, or does not match ``kind``.
    """
    data = (await _receive_in_time(request, config)).removeprefix(codecs.BOM_UTF8)
    is_large = data.count(b'"') > 2 * MAX_STRINGS or data.count(b"{") > MAX_STRINGS
    is_strict = config.strict or is_large
    wanted = strict(kind) if is_strict else kind

    def read() -> R:
        body: B = decode(data, wanted)
        if not is_strict:
            request.scope[IGNORED] = _ignored(data, kind)
        body.check_fields()
        return convert(body)

    if len(data) <= MAX_INLINE_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_decoding, read)


def note_ignored(scope: Scope, paths: Iterable[str]) -> None:
    """Record that the service ignores these fields of a request."""
    scope.setdefault(IGNORED, []).extend(paths)


def _ignored(data: bytes, kind: type[Body]) -> list[str]:
    """Return the paths of the fields that ``kind`` and its parts do not have.

    If several items of a list have the same unknown field, only the first path is returned.

    Raises:
        InvalidParameterError: a field asks for a feature that the service does not have.
    """
    found: dict[str, str] = {}
    for path in _unknown(decode(data, dict[str, msgspec.Raw]), kind, ""):
        if len(found) < MAX_IGNORED:
            found.setdefault(_without_indexes(path), path)
    return list(found.values())


def _unknown(fields: dict[str, msgspec.Raw], kind: type[Body], path: str) -> Iterator[str]:
    """Yield the paths of unknown fields, such as ``messages[0].foo``."""
    for name in sorted(fields):
        value = fields[name]
        if name in kind.PARTS:
            for place, part in _parts_of(value):
                yield from _unknown(part, kind.PARTS[name], f"{path}{name}{place}.")
        elif name not in kind.__struct_fields__:
            if name in NOT_OFFERED and bytes(value) not in _NOTHING:
                raise InvalidParameterError(f"{path}{name} is not offered", f"{path}{name}")
            if _NAME.fullmatch(name):
                yield path + name


def _parts_of(value: msgspec.Raw) -> Iterator[tuple[str, dict[str, msgspec.Raw]]]:
    """Yield two values for each object in a list: the object's index as ``[index]``, and the
    object's fields. For a single object, the first value is "".

    Yields nothing for other values. Wrong values are found later, when the field is decoded.
    """
    begin = bytes(memoryview(value)[:1])
    try:
        if begin == b"{":
            yield "", decode(value, dict[str, msgspec.Raw])
        elif begin == b"[":
            for i, part in enumerate(decode(value, list[dict[str, msgspec.Raw]])):
                yield f"[{i}]", part
    except InvalidParameterError:
        return


def _without_indexes(path: str) -> str:
    return _INDEX.sub("[]", path)


class IgnoredFields:
    """Logs each ignored field once. The number of logged fields is limited."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._names: set[str] = set()

    def note(self, route: str, paths: list[str]) -> None:
        names = map(_without_indexes, paths)
        new = [name for name in names if name not in self._names]
        if new and len(self._names) < self._most:
            self._names.update(new)
            log.warning("%s: unknown parameters are ignored: %s", route, ", ".join(new))


async def _receive(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLargeError(f"the request body exceeds {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


def decode(data: bytes | msgspec.Raw, kind: Any, param: str = "") -> Any:
    """Decode strict JSON: no NaN, no unpaired surrogates, bounded nesting.

    Args:
        param: name of the field that contains ``data``; empty for a whole body.

    Raises:
        InvalidParameterError: the first error in the data, with the field's name.
    """
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as e:
        raise _explained(str(e), param) from None
    except RecursionError:
        raise InvalidParameterError("the request body is nested too deeply") from None
    except ValueError as e:  # msgspec.DecodeError and UnicodeDecodeError
        raise InvalidParameterError(
            f"{param or 'the request body'} is not valid JSON: {_reason(str(e), bytes(data))}",
            param or None,
        ) from None


def _reason(message: str, data: bytes) -> str:
    """Return the reason why data is not JSON. For empty data and unpaired surrogates, msgspec's
    reason would be wrong.
    """
    if not data.strip():
        return "it is empty"
    if "malformed: invalid character" not in message and (found := _UNPAIRED.search(data)):
        return f"{found[0].decode()} is an unpaired surrogate"
    return message


def _explained(message: str, param: str) -> InvalidParameterError:
    """Return msgspec's error in OpenAI's form. The path ``$.messages[0].role`` of a wrong value
    becomes ``messages.0.role``.
    """
    match = _PLACE.fullmatch(message)
    assert match is not None
    path = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", match["path"] or "").replace("...", "*")
    parts = [part for part in (param, path.strip(".")) if part]
    found = match["what"]
    for pattern, words in (
        (_UNKNOWN, "unknown parameter"),
        (_MISSING, "missing required parameter"),
    ):
        if about := pattern.fullmatch(found):
            name = shorten(".".join([*parts, about["name"]]))
            return InvalidParameterError(f"{words}: {name}", name)
    words = shorten(found[0].lower() + found[1:].replace("`", ""))
    if not parts:
        return InvalidParameterError(f"the request body: {words}")
    name = shorten(".".join(parts))
    return InvalidParameterError(f"{name}: {words}", name)


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def is_empty(raw: Raw, empty: bytes) -> bool:
    """Return whether a JSON field is absent, null or ``empty``. ``empty`` is ``[]`` or ``{}``."""
    return bytes(raw) in (b"", b"null", empty)
