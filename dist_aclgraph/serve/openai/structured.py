"""Reads the output format from requests in the style of OpenAI, vLLM and SGLang."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import MAX_STRUCTURE_CHARS, StructuredOutputs
from dist_aclgraph.serve.openai.body import Body, decode
from dist_aclgraph.serve.openai.counted import check_num_strings

MAX_STRINGS = 1 << 14
# Fields of chats and completions that demand an output format, e.g. a JSON schema or a pattern.
FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_choice",
    "json_schema",
    "guided_regex",
    "guided_grammar",
    "regex",
    "ebnf",
)
_NOTHING = (b"", b"null", b"{}", b"[]")
# Some clients send the schema directly, and not in the field ``schema`` of an object. An object
# with one of these keywords is a schema.
KEYWORDS = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "items"}
# for each type, the field that contains the pattern or the grammar
_TEXT_FIELDS = {"regex": "pattern", "grammar": "grammar"}


class _JsonSchema(Body, kw_only=True):
    schema: Raw = Raw()
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    """The output format, in the fields of OpenAI's API.

    Some types and fields come from other servers' APIs. ``huggingface_hub`` sends every JSON schema
    as ``value``; a regex may be in ``value`` or ``pattern``.
    """

    PARTS: ClassVar = {"json_schema": _JsonSchema}

    type: Literal[
        "text", "json_object", "json_schema", "structural_tag", "json", "regex", "grammar"
    ]
    json_schema: _JsonSchema | None = None
    schema: Raw = Raw()
    value: Raw = Raw()
    pattern: str | None = None
    grammar: str | None = None


class TextFormat(Body, kw_only=True):
    """The output format, in the fields of the Responses API."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: Raw = Raw()
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Structured(Body, kw_only=True):
    """The output format, in vLLM's fields."""

    json: Raw = Raw(b"")
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


def read_structured(
    body: Body,
    objects: Mapping[str, Raw],
    texts: Mapping[str, str | None],
    whitespace: str | None,
) -> StructuredOutputs | None:
    """Return the output format that a request demands; None for any text.

    Args:
        body: the request, whose class decides whether unknown fields of parts are refused.
        objects: fields whose values are JSON.
        texts: fields whose values are texts.
        whitespace: the pattern of white space in JSON.

    Raises:
        InvalidParameterError: several fields demand different formats, or a format is wrong.
    """
    forms: dict[str, StructuredOutputs] = {}
    for name, raw in objects.items():
        data = bytes(raw)
        if data in _NOTHING:
            continue
        _check_size(data, name)
        with _errors_name(name):
            form = _read(body, name, raw, whitespace)
        if form is not None:
            forms[name] = form
    for name, text in texts.items():
        if text:
            with _errors_name(name):
                forms[name] = _form_of_text(text, is_regex=name.endswith("regex"))
    # A client may send the same format in the fields of several servers.
    first, *others = sorted(forms) or [""]
    for other in others:
        if forms[other] != forms[first]:
            raise InvalidParameterError(
                f"{first} and {other} both ask for a form of the answer; give one of them", other
            )
    return forms.get(first)


@contextlib.contextmanager
def _errors_name(name: str) -> Iterator[None]:
    """Within this context, errors of ``StructuredOutputs`` name the client's field."""
    try:
        yield
    except InvalidParameterError as e:
        if e.param != FIELDS[1]:
            raise
        raise InvalidParameterError(str(e).replace(e.param, name, 1), name) from None


def _form_of_text(text: str, *, is_regex: bool) -> StructuredOutputs:
    return StructuredOutputs(regex=text if is_regex else None, grammar=None if is_regex else text)


def read_text_format(found: TextFormat, param: str) -> StructuredOutputs | None:
    """Return the output format; None for any text.

    Args:
        param: the field that contains the format; used in error messages.
    """
    if found.type == "text":
        return None
    if found.type == "json_object":
        return StructuredOutputs(json_object=True)
    if not bytes(found.schema):
        raise InvalidParameterError(f"{param}.schema is missing", f"{param}.schema")
    _check_size(bytes(found.schema), f"{param}.schema")
    with _errors_name(param):
        return StructuredOutputs(json=_schema(found.schema, f"{param}.schema"))


def _check_size(data: bytes, param: str) -> None:
    if len(data) > 2 * MAX_STRUCTURE_CHARS:
        raise InvalidParameterError(
            f"{param} has {len(data)} bytes; at most {2 * MAX_STRUCTURE_CHARS} are allowed", param
        )
    check_num_strings(data, MAX_STRINGS, param)


def field_of_form(body: Body) -> str:
    """Return the name of the field that demands an output format, for error messages."""
    for name in FIELDS:
        value = getattr(body, name)
        if value and (isinstance(value, str) or bytes(value) not in _NOTHING):
            return name
    return FIELDS[0]


def _read(body: Body, name: str, raw: Raw, whitespace: str | None) -> StructuredOutputs | None:
    if name == "response_format":
        return _read_response_format(body, raw, whitespace)
    if name == "structured_outputs":
        found: Structured = decode(raw, body.kind_of_part(Structured), name)
        if found.structural_tag is not None:
            raise InvalidParameterError("structured_outputs.structural_tag is not offered", name)
        text = None
        if bytes(found.json) not in (b"", b"null"):
            text = _schema(found.json, f"{name}.json")
            if found.disable_additional_properties:
                text = json.dumps(_closed(json.loads(text)))
        return StructuredOutputs(
            json=text,
            regex=found.regex,
            choice=found.choice,
            grammar=found.grammar,
            json_object=found.json_object,
            whitespace_pattern=found.whitespace_pattern or whitespace,
            disable_any_whitespace=found.disable_any_whitespace,
        )
    if name == "guided_choice":
        return StructuredOutputs(choice=decode(raw, list[str], name))
    return StructuredOutputs(json=_schema(raw, name), whitespace_pattern=whitespace)


def _read_response_format(body: Body, raw: Raw, whitespace: str | None) -> StructuredOutputs | None:
    param, kind = "response_format", body.kind_of_part(ResponseFormat)
    found: ResponseFormat = decode(raw, kind, param)
    if found.type == "text":
        return None
    if found.type == "structural_tag":
        raise InvalidParameterError(
            "response_format of type structural_tag is not offered; use json_schema or tools",
            "response_format",
        )
    if found.type in ("regex", "grammar"):
        name = "value" if bytes(found.value) not in _NOTHING else _TEXT_FIELDS[found.type]
        text = decode(found.value, str, f"{param}.value") if name == "value" else None
        text = text or getattr(found, _TEXT_FIELDS[found.type])
        if not text:
            raise InvalidParameterError(f"{param}.{name} is missing", f"{param}.{name}")
        return _form_of_text(text, is_regex=found.type == "regex")
    if found.type in ("json_object", "json"):
        for field in ("schema", "value"):
            raw = getattr(found, field)
            if bytes(raw) not in _NOTHING:
                text = _schema(raw, f"{param}.{field}")
                return StructuredOutputs(json=text, whitespace_pattern=whitespace)
        return StructuredOutputs(json_object=True, whitespace_pattern=whitespace)
    text = _schema(*_find_schema(found, raw))
    return StructuredOutputs(json=text, whitespace_pattern=whitespace)


def _find_schema(found: ResponseFormat, raw: Raw) -> tuple[Raw, str]:
    """Return the schema of a format of the type json_schema, and the schema's field.

    Some clients write ``schema`` beside ``type``. Without a schema, every JSON text is allowed.
    """
    param = "response_format.json_schema"
    if bytes(found.schema) not in (b"", b"null"):
        return found.schema, "response_format.schema"
    if found.json_schema is None:
        raise InvalidParameterError(f"{param} is missing", param)
    if bytes(found.json_schema.schema) not in (b"", b"null"):
        return found.json_schema.schema, f"{param}.schema"
    own = decode(raw, dict[str, Raw], param)["json_schema"]
    if keywords := sorted(KEYWORDS & decode(own, dict[str, Raw], param).keys()):
        raise InvalidParameterError(
            f"{param}.schema is missing; {keywords[0]} is beside it, and has no effect there",
            f"{param}.schema",
        )
    return Raw(b"{}"), f"{param}.schema"


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that the schema lists."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    is_open = "properties" in schema and "patternProperties" not in schema
    return {"additionalProperties": False, **inner} if is_open else inner


def _schema(raw: Raw, param: str) -> str:
    """Return the text of a schema.

    The value is an object, a boolean, or a string with the JSON text of an object or boolean. The
    text is not changed, because the answer's keys must have the order of the schema's keys.
    """
    data = bytes(raw)
    if data.startswith(b'"'):
        text: str = decode(raw, str, param)
        data = text.encode()
    value: Any = decode(data, Any, param)
    if not isinstance(value, dict | bool):
        raise InvalidParameterError(f"{param} must be a JSON schema, which is an object", param)
    return data.decode()
