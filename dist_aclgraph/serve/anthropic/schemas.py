"""JSON schemas for OpenAPI, for request fields whose items are counted before they are decoded."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from dist_aclgraph.sampling import MAX_STOP_STRINGS
from dist_aclgraph.serve.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    TOOL_NAME,
)

Json = dict[str, Any]


def _object(required: tuple[str, ...], **properties: Json) -> Json:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Json, most: int, least: int = 1) -> Json:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _or_null(*schemas: Json) -> Meta:
    return Meta(extra_json_schema={"anyOf": [*schemas, {"type": "null"}]})


_STRING: Json = {"type": "string"}
_STRING_OR_NULL: Json = {"type": ["string", "null"]}
_TEXT = _object(("type", "text"), type={"const": "text"}, text=_STRING)
_TEXTS: Json = {"anyOf": [_STRING, _list(_TEXT, MAX_PARTS)]}
_DOCUMENT = _object(
    ("type", "source"),
    type={"const": "document"},
    title=_STRING_OR_NULL,
    context=_STRING_OR_NULL,
    source={
        "anyOf": [
            _object(("type", "data"), type={"const": "text"}, data=_STRING),
            _object(("type", "content"), type={"const": "content"}, content=_TEXTS),
        ]
    },
)
_FOUND = _object(
    ("type", "source", "content"),
    type={"const": "search_result"},
    title=_STRING_OR_NULL,
    source=_STRING_OR_NULL,
    content=_TEXTS,
)
_REFERENCE = _object(("type", "tool_name"), type={"const": "tool_reference"}, tool_name=_STRING)
_RESULT = _object(
    ("type", "tool_use_id"),
    type={"const": "tool_result"},
    tool_use_id=_STRING,
    content={
        "anyOf": [
            _STRING,
            _list({"anyOf": [_TEXT, _DOCUMENT, _FOUND, _REFERENCE]}, MAX_PARTS, least=0),
            {"type": "null"},
        ]
    },
    is_error={"type": ["boolean", "null"]},
)
_USE = _object(
    ("type", "id", "name", "input"),
    type={"const": "tool_use"},
    id=_STRING_OR_NULL,
    name=_STRING,
    input={"type": ["object", "null"]},
)
_THOUGHT = _object(("type", "thinking"), type={"const": "thinking"}, thinking=_STRING)


def _turn(role: str, *blocks: Json) -> Json:
    content = {"anyOf": [_STRING, _list({"anyOf": [_TEXT, *blocks]}, MAX_PARTS)]}
    return _object(("role", "content"), role={"const": role}, content=content)


MESSAGES = Meta(
    extra_json_schema=_list(
        {"anyOf": [_turn("user", _RESULT, _DOCUMENT, _FOUND), _turn("assistant", _USE, _THOUGHT)]},
        MAX_MESSAGES,
    )
)
SYSTEM = _or_null(_STRING, _list(_TEXT, MAX_PARTS, least=0))
TOOLS = _or_null(
    _list(
        _object(
            ("name", "input_schema"),
            type={"enum": ["custom", None]},
            name=TOOL_NAME,
            description=_STRING_OR_NULL,
            input_schema={"type": ["object", "null"]},
        ),
        MAX_TOOLS,
        least=0,
    )
)
TOOL_CHOICE = _or_null(
    _object(("type",), type={"enum": ["auto", "any", "none"]}),
    _object(("type", "name"), type={"const": "tool"}, name=_STRING),
)
THINKING = _or_null(
    _object(("type",), type={"enum": ["disabled", "adaptive"]}),
    _object(
        ("type", "budget_tokens"),
        type={"const": "enabled"},
        budget_tokens={"type": ["integer", "null"], "minimum": 0},
    ),
)
_FORMAT = _object(("type", "schema"), type={"const": "json_schema"}, schema={"type": "object"})
FORMAT = _or_null(_FORMAT)
OUTPUT_CONFIG = _or_null(
    _object((), effort=_STRING_OR_NULL, format={"anyOf": [_FORMAT, {"type": "null"}]})
)
STOP = _or_null(_list({"type": "string", "minLength": 1}, MAX_STOP_STRINGS, least=0))
OBJECT = _or_null({"type": "object"})
