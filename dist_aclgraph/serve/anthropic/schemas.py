"""JSON schemas of some request fields. The items in such a field are counted before the field is
decoded. The OpenAPI document contains these schemas.
"""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from dist_aclgraph.sampling import MAX_STOP_STRINGS
from dist_aclgraph.serve.openai.schemas import (
    EMPTY,
    HOSTED_TOOL,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    TEXT_FORMATS,
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
    ("type", "name"),
    type={"const": "tool_use"},
    id=_STRING_OR_NULL,
    name=_STRING,
    input={"type": ["object", "null"]},
)
_THOUGHT = _object(("type", "thinking"), type={"const": "thinking"}, thinking=_STRING)
_HIDDEN = _object(("type",), type={"const": "redacted_thinking"})


def _turn(role: str, *blocks: Json) -> Json:
    content = {"anyOf": [_STRING, _list({"anyOf": [_TEXT, _HIDDEN, *blocks]}, MAX_PARTS)]}
    return _object(("role", "content"), role={"const": role}, content=content)


MESSAGES = Meta(
    extra_json_schema=_list(
        {
            "anyOf": [
                _turn("user", _RESULT, _DOCUMENT, _FOUND),
                _turn("assistant", _USE, _THOUGHT),
                _turn("system"),
            ]
        },
        MAX_MESSAGES,
    )
)
SYSTEM = _or_null(_STRING, _list(_TEXT, MAX_PARTS, least=0))
_TOOL = _object(
    ("name",),
    type={"enum": ["custom", None]},
    name=TOOL_NAME,
    description=_STRING_OR_NULL,
    input_schema={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
)
TOOLS = _or_null(_list({"anyOf": [_TOOL, HOSTED_TOOL]}, MAX_TOOLS, least=0))
TOOL_CHOICE = _or_null(
    _object(("type",), type={"enum": ["auto", "any", "none"]}),
    _object(("type", "name"), type={"const": "tool"}, name=_STRING),
)
THINKING = _or_null(
    EMPTY,
    _object(
        ("type",),
        type={"enum": ["enabled", "disabled", "adaptive", "between_tools"]},
        budget_tokens={"type": ["integer", "null"], "minimum": 0},
    ),
)
FORMAT = _or_null(*TEXT_FORMATS)
OUTPUT_CONFIG = _or_null(
    _object((), effort=_STRING_OR_NULL, format={"anyOf": [*TEXT_FORMATS, {"type": "null"}]})
)
STOP = _or_null(_list({"type": "string", "minLength": 1}, MAX_STOP_STRINGS, least=0))
OBJECT = _or_null({"type": "object"})
