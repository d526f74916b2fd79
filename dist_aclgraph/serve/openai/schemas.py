"""JSON schemas of the request fields whose items are counted before they are decoded. The OpenAPI
document contains these schemas.
"""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from dist_aclgraph.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_PROMPTS = 64  # maximum number of prompts times ``n`` in one request
MAX_MESSAGES = 1024
MAX_PARTS = 1024  # maximum number of parts of one message
MAX_ITEMS = 4 * MAX_MESSAGES  # maximum number of items in the input of a Responses request
MAX_TOOLS = 512  # maximum number of tools of one request
# Beginnings of the types of tools that a provider runs itself.
HOSTED = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution"),
    *("image_generation", "tool_search", "mcp"),
)
MAX_NAME_CHARS = 128  # maximum number of characters of a tool's name

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of parts of a message
_PART = {
    "anyOf": [
        {"type": "string"},
        *(
            {
                "type": "object",
                "required": ["type", key],
                "properties": {"type": {"enum": kinds}, key: {"type": "string"}},
            }
            for key, kinds in (("text", TEXT_PARTS[:-1]), ("refusal", TEXT_PARTS[-1:]))
        ),
    ]
}
# Parts that only an assistant's message may have.
_THOUGHTS = (
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"const": "thinking"},
            "thinking": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": _PART["anyOf"][1], "maxItems": MAX_PARTS},
                    {"type": "null"},
                ]
            },
        },
    },
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["reasoning", "redacted_thinking"]},
            "reasoning": {"type": ["string", "null"]},
        },
    },
)
HOSTED_TOOL = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"type": "string", "pattern": f"^({'|'.join(HOSTED)})"}},
    "description": "left out, because a provider runs it",
}
# Schema of an empty object. A field with this value counts as absent.
EMPTY = {"type": "object", "maxProperties": 0}


def _field(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _or_null(*schemas: dict[str, Any]) -> Meta:
    return _field(anyOf=[*schemas, {"type": "null"}])


ANNOTATIONS = _or_null({"type": "array"})
CONTENT = _or_null(
    {"type": "string"},
    {"type": "array", "items": {"anyOf": [*_PART["anyOf"], *_THOUGHTS]}, "maxItems": MAX_PARTS},
)
DOCUMENTS = _or_null({"type": "array", "items": {"type": "object"}})
IGNORED = _field(description="accepted, and without effect")
KV_TRANSFER = _or_null(
    {
        "type": "object",
        "properties": {
            "do_remote_decode": {"type": ["boolean", "null"]},
            "do_remote_prefill": {"type": ["boolean", "null"]},
        },
    }
)
LOGIT_BIAS = _or_null(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASES,
    }
)
ALLOWED_IDS = _or_null(_IDS | {"maxItems": MAX_ALLOWED_IDS})
BAD_WORDS = _or_null({"type": "array", "items": _TEXT, "maxItems": MAX_BAD_WORDS})
MESSAGES = _field(
    type="array",
    items={"$ref": "#/components/schemas/ChatMessage"},
    minItems=1,
    maxItems=MAX_MESSAGES,
)
PROMPT = _field(
    anyOf=[
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS | {"minItems": 1},
        {
            "type": "array",
            "items": _IDS | {"minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
)
_KIND = {"type": "object", "required": ["type"]}
_SCHEMA = {"type": ["object", "boolean", "string"]}
_SCHEMA_OR_NULL = {"anyOf": [_SCHEMA, {"type": "null"}]}
RESPONSE_FORMAT = _or_null(
    EMPTY,
    _KIND
    | {
        "properties": {
            "type": {"enum": ["text", "json_object", "json"]},
            "schema": _SCHEMA_OR_NULL,
            "value": _SCHEMA_OR_NULL,
        }
    },
    _KIND
    | {
        "required": ["type", "json_schema"],
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {
                "type": "object",
                "properties": {
                    "name": {"type": ["string", "null"]},
                    "schema": _SCHEMA_OR_NULL,
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
    _KIND
    | {
        "required": ["type", "schema"],
        "properties": {"type": {"const": "json_schema"}, "schema": _SCHEMA},
    },
    *(
        _KIND
        | {
            "required": ["type", name],
            "properties": {"type": {"const": kind}, name: _TEXT},
        }
        for kind, names in (("regex", ("pattern", "value")), ("grammar", ("grammar", "value")))
        for name in names
    ),
)
TEXTS = _or_null({"type": "array", "items": _TEXT})
ANYTHING = _or_null({"type": "object"}, {"type": "string"})
STRUCTURED_OUTPUTS = _or_null({"type": "object"})
STOP = _or_null(_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOP_STRINGS})
STOP_TOKEN_IDS = _or_null(_IDS | {"maxItems": MAX_STOP_TOKEN_IDS})
STREAM_OPTIONS = _or_null(
    {
        "type": "object",
        "properties": {
            "include_usage": {"type": "boolean"},
            "continuous_usage_stats": {"type": "boolean"},
            "include_obfuscation": {"const": False},
        },
        "additionalProperties": False,
    }
)
THINKING = _or_null(
    {"type": "boolean"},
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string"},
            "budget_tokens": {"type": ["integer", "null"], "minimum": 0},
        },
    },
)
REASONING = _or_null(
    {
        "type": "object",
        "properties": {
            "effort": {"type": ["string", "null"]},
            "enabled": {"type": ["boolean", "null"]},
            "max_tokens": {"type": ["integer", "null"], "minimum": 0},
        },
    }
)
TOKEN_IDS = _field(**_IDS)
VARIABLES = _or_null({"type": "object"})
_NAMED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}},
}
# The schema has no pattern, because ``\w`` in a JSON schema means only ASCII letters and digits.
TOOL_NAME = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_NAME_CHARS,
    "description": "letters and digits of all scripts, and characters of _ . : / -",
}
_FUNCTION_OR_NULL = {"enum": ["function", None]}
_TOOL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": _FUNCTION_OR_NULL,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": TOOL_NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
TOOLS = _or_null({"type": "array", "maxItems": MAX_TOOLS, "items": {"anyOf": [_TOOL, HOSTED_TOOL]}})
_MODE = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["none", "auto", "required", "any"]}},
}
TOOL_CHOICE = _or_null(
    {"enum": ["none", "auto", "required", "any"]},
    _MODE,
    {
        "type": "object",
        "required": ["function"],
        "properties": {"type": {"enum": ["function", "tool"]}, "function": _NAMED},
    },
    {
        "type": "object",
        "required": ["name"],
        "properties": {"type": {"enum": ["function", "tool"]}, "name": {"type": "string"}},
    },
    {
        "type": "object",
        "required": ["type", "allowed_tools"],
        "properties": {
            "type": {"const": "allowed_tools"},
            "allowed_tools": {
                "type": "object",
                "required": ["mode", "tools"],
                "properties": {
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {"type": "array", "items": {"type": "object"}},
                },
            },
        },
    },
)
_CALLED = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "arguments": {"type": ["string", "object", "null"]},
    },
}
TOOL_CALLS = _or_null(
    {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["function"],
            "properties": {
                "id": {"type": ["string", "null"]},
                "type": _FUNCTION_OR_NULL,
                "function": _CALLED,
            },
        },
    }
)
CALLED = _or_null(_CALLED)
OBJECT = _or_null({"type": "object"})
NO_VALUE = _or_null()
_ITEM_PART = {"anyOf": _PART["anyOf"][1:]}
_TEXTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": _ITEM_PART, "maxItems": MAX_PARTS},
    ]
}
_TEXTS_OR_NULL = {"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]}
_MESSAGE = {"enum": ["message", None]}
_THOUGHT = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"enum": ["reasoning_text", "summary_text", "text"]},
        "text": {"type": "string"},
    },
}
_THOUGHTS_OR_NULL = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": _THOUGHT, "maxItems": MAX_PARTS},
        {"type": "null"},
    ]
}
INPUT = _field(
    anyOf=[
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_ITEMS,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "required": ["role", "content"],
                        "properties": {
                            "type": _MESSAGE,
                            "role": {"enum": ["user", "system", "developer"]},
                            "content": _TEXTS,
                        },
                    },
                    {
                        "type": "object",
                        "required": ["role"],
                        "properties": {
                            "type": _MESSAGE,
                            "role": {"const": "assistant"},
                            "content": _TEXTS_OR_NULL,
                        },
                    },
                    {
                        "type": "object",
                        "required": ["type", "call_id", "name"],
                        "properties": {
                            "type": {"const": "function_call"},
                            "call_id": {"type": "string"},
                            "name": {"type": "string"},
                            "arguments": {"type": ["string", "null"]},
                        },
                    },
                    {
                        "type": "object",
                        "required": ["type", "call_id", "output"],
                        "properties": {
                            "type": {"const": "function_call_output"},
                            "call_id": {"type": "string"},
                            "output": _TEXTS,
                        },
                    },
                    {
                        "type": "object",
                        "required": ["type"],
                        "properties": {
                            "type": {"const": "reasoning"},
                            "summary": _THOUGHTS_OR_NULL,
                            "content": _THOUGHTS_OR_NULL,
                            "encrypted_content": {"type": ["string", "null"]},
                        },
                    },
                ]
            },
        },
    ]
)
_FLAT_TOOL = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": TOOL_NAME,
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMESPACE = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string"},
        "tools": {
            "anyOf": [
                {"type": "array", "items": _FLAT_TOOL, "maxItems": MAX_TOOLS},
                {"type": "null"},
            ]
        },
    },
}
FLAT_TOOLS = _or_null(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": {"anyOf": [_FLAT_TOOL, _NAMESPACE, HOSTED_TOOL]},
    }
)
FLAT_TOOL_CHOICE = _or_null(
    {"enum": ["none", "auto", "required", "any"]},
    _MODE,
    {
        "type": "object",
        "required": ["type", "name"],
        "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    },
    {
        "type": "object",
        "required": ["type", "tools"],
        "properties": {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        },
    },
)
TEXT_FORMATS = (
    {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"]}},
    },
    {
        "type": "object",
        "required": ["type", "schema"],
        "properties": {"type": {"const": "json_schema"}, "schema": _SCHEMA},
    },
)
TEXT_CONFIG = _or_null(
    {
        "type": "object",
        "properties": {
            "format": {"anyOf": [*TEXT_FORMATS, {"type": "null"}]},
            "verbosity": {"type": ["string", "null"]},
        },
    }
)
