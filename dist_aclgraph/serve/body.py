"""Request bodies: bounded, strictly JSON, checked by a pydantic model; every fault is a 4xx."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.errors import BodyTooLargeError, from_validation

M = TypeVar("M", bound=pydantic.BaseModel)
MAX_DEPTH = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, model: type[M], *, max_bytes: int, lenient: bool) -> M:
    """Return the parsed body.

    Raises:
        BodyTooLargeError: it is longer than ``max_bytes``.
        InvalidParameterError: it is not JSON, or not what the model describes.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise BodyTooLargeError(f"the request body exceeds {max_bytes} bytes")
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > max_bytes:
                raise BodyTooLargeError(f"the request body exceeds {max_bytes} bytes")
    except ClientDisconnect:
        raise InvalidParameterError("the request body is incomplete") from None
    content = parse_json(bytes(data))
    if not isinstance(content, dict):
        raise InvalidParameterError("the request body must be a JSON object")
    if lenient:
        content = {key: value for key, value in content.items() if key in model.model_fields}
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as e:
        raise from_validation(e) from None


def parse_json(data: bytes) -> Any:
    """Parse strict JSON: no NaN, no lone surrogates, bounded nesting and integers.

    Raises:
        InvalidParameterError: the first thing that is wrong.
    """
    try:
        text = data.decode("utf-8")
        content = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidParameterError("the request body is nested too deeply") from None
    except ValueError as e:  # also UnicodeDecodeError and integers of thousands of digits
        raise InvalidParameterError(f"the request body is not valid JSON: {e}") from None
    if _depth_exceeds(content, MAX_DEPTH):
        raise InvalidParameterError("the request body is nested too deeply")
    if _SURROGATE.search(text):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidParameterError("the request body holds an unpaired surrogate") from None
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
