"""Finds the strings and the constants that a JSON schema allows. Some formats write strings without
quotes, and some formats write constants as Python does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.one_of import exclude_each_other
from dist_aclgraph.formats.regex_dialect import in_dialect
from dist_aclgraph.formats.typed_values import WORDS, target_of, types_of

# Keywords that restrict a string. A grammar for strings without quotes supports keywords of one
# group, not of several groups.
_GROUPS = ({"enum", "const"}, {"pattern"}, {"minLength", "maxLength"})
_OF_STRINGS = set().union(
    *_GROUPS,
    {"type", "anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef"},
)
# Keywords whose value contains other schemas, or refers to other schemas.
_DIVIDING = {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef"}


def not_by_parameters(tool: str, problem: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"tools: this model writes the arguments of a call one by one, by their names, and the "
        f"schema of {tool} {problem}; change the schema, or the tool cannot be strict",
        "tools",
    )


def strings_of(
    tool: str, name: str, schema: Any, root: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return schemas without references and branches. A string matches the schema of a parameter if
    it matches one of these schemas.

    Raises:
        InvalidParameterError: the grammar of a string without quotes does not support the schema.
    """
    found = _undivided(schema, root, of_strings=True)
    for part in found:
        if not isinstance(part, Mapping):
            raise not_by_parameters(tool, f"has no schema for the string {name!r:.40}")
        keys = _restrictions(part, of_strings=True)
        if not any(keys <= group for group in _GROUPS):
            raise not_by_parameters(
                tool,
                f"uses {' with '.join(sorted(keys))} for the string {name!r:.40}, which has no "
                "quotes",
            )
    return found


def _undivided(schema: Any, root: Any, *, of_strings: bool = False) -> list[Any]:
    """Return the schemas to which the references and branches of ``schema`` lead. A value that
    matches one of these schemas matches ``schema``.

    Args:
        of_strings: whether the keyword ``type: string`` is not a restriction, because the caller
            needs only values that are strings.
    """
    found, left, followed = [], [schema], set()
    while left:
        part = left.pop()
        keys = _restrictions(part, of_strings=of_strings)
        if keys == {"$ref"} and isinstance(reference := part["$ref"], str):
            # A reference that was already followed adds no values.
            left += [] if reference in followed else [target_of(reference, root)]
            followed.add(reference)
        elif (branches := _branches_of(keys, part, root)) is not None:
            left += branches
        else:
            found.append(part)
    return found


def _restrictions(schema: Any, *, of_strings: bool) -> set[str]:
    """Return the keywords of a schema that may restrict a string or a constant."""
    keys = _OF_STRINGS & schema.keys() if isinstance(schema, Mapping) else set()
    return keys - {"type"} if of_strings and schema.get("type") in ("string", ["string"]) else keys


def words_of(schema: Any, root: Any) -> list[str]:
    """Return the constants that a schema allows, as Python writes them. The result omits a constant
    if this function cannot decide whether the schema allows it.
    """
    parts = [part for part in _undivided(schema, root) if isinstance(part, Mapping)]
    return [
        word
        for word, value in WORDS.items()
        if any(_DIVIDING.isdisjoint(part) and _has_constant(part, value) for part in parts)
    ]


def _has_constant(schema: Mapping[str, Any], value: bool | None) -> bool:
    """Return whether a schema without a keyword of ``_DIVIDING`` allows ``value``."""
    kinds = types_of({"type": schema.get("type")}, {})
    values = [schema["enum"]] if "enum" in schema else []
    values += [[schema["const"]]] if "const" in schema else []
    return (not kinds or bool(kinds & types_of({"const": value}, {}))) and all(
        isinstance(each, list) and any(value is one for one in each) for each in values
    )


def patterns_of(schema: Any, root: Any, excluded: Sequence[str]) -> list[str | None]:
    """Return regular expressions for strings that a schema allows. An element None stands for an
    expression that matches every string.

    The schema may allow further strings, for example strings with a ``format``.

    Args:
        excluded: texts that the values of an enum must not contain.
    """
    found: list[str | None] = []
    for part in _undivided(schema, root):
        keys = _restrictions(part, of_strings=False) - {"type"}
        is_followed = any(keys <= group for group in _GROUPS)
        if not isinstance(part, Mapping) or not is_followed or "format" in part:
            continue
        kinds = types_of({"type": part.get("type")}, {})
        pattern = pattern_of(part, excluded)
        if (not kinds or "string" in kinds) and pattern is not None:
            found.append(pattern if keys else None)
    return found


def _branches_of(keys: set[str], schema: Mapping[str, Any], root: Any) -> list[Any] | None:
    """Return the branches of a schema whose dividing keywords are ``keys``. Return None if a value
    may match one branch and still not match the schema.
    """
    for key in keys & {"anyOf", "oneOf", "allOf"}:
        found = schema[key]
        if len(keys) > 1 or not isinstance(found, list):
            return None
        is_alone = len(found) == 1
        if key == "anyOf" or is_alone or (key == "oneOf" and exclude_each_other(found, root)):
            return found
    return None


def _values_of(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the only strings that a schema allows; None if the schema does not list them."""
    values = schema.get("enum")
    if "const" in schema:
        value = schema["const"]
        values = [value] if not isinstance(values, list) or value in values else []
    return [each for each in values if isinstance(each, str)] if isinstance(values, list) else None


def pattern_of(schema: Mapping[str, Any], ends: Sequence[str]) -> str | None:
    """Return a regular expression for the strings that a schema allows.

    Return None if every allowed string contains one of ``ends``.

    Args:
        schema: a schema from the result of ``strings_of``.
    """
    values = _values_of(schema)
    if values is not None:
        kept = [re.escape(value) for value in values if not any(end in value for end in ends)]
        return f"({'|'.join(kept)})" if kept else None
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        pattern = in_dialect(pattern)
        begin = "" if pattern.startswith("^") else r"(.|\n)*"
        end = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else r"(.|\n)*"
        inner = pattern.removeprefix("^")
        return f"{begin}({inner if end else inner[:-1]}){end}"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return rf"(.|\n){{{least or 0},{'' if most is None else most}}}"
    return r"(.|\n)*"
