"""Replaces JSON schema keywords that llguidance refuses by keywords that llguidance supports.

The original schema allows every value that the new schema allows. A keyword that cannot be replaced
stays in the schema; llguidance then refuses the schema, and its error names the keyword.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_aclgraph.formats.look_ahead import ANY, without_look_ahead
from dist_aclgraph.formats.no_effect import leave_out_no_effect
from dist_aclgraph.formats.one_of import parts_of
from dist_aclgraph.formats.regex_dialect import in_dialect
from dist_aclgraph.formats.typed_values import OTHER_NAMES, resolve

# Keywords that do not restrict the name of a property.
_NOTES = {"type", "title", "description", "default", "examples"}
# llguidance refuses a ``minimum`` or ``maximum`` with an absolute value of 2**63 or more. Schemas
# contain such limits, for example the least 64-bit integer and the largest 32-bit float. MOST is
# the largest float below 2**63.
MOST = 2**63 - 1024


def use_equivalents(schema: dict[str, Any]) -> None:
    """In a schema, replace the keywords that llguidance does not support; see also
    ``leave_out_no_effect``.
    """
    for part in parts_of(schema):
        _replace_names(part, schema)
        if part.get("not") in ({}, True):  # zod's form of a schema that allows no value
            part.clear()
            part["enum"] = []
        pattern = part.get("pattern")
        if isinstance(pattern, str):
            if part.get("format") == "time":
                # The format requires an offset from UTC, but zod's pattern for times allows no
                # offset. The format can be removed, because validators ignore formats by default.
                del part["format"]
            if "(?" in pattern:
                _replace_look_ahead(part, pattern)
            part["pattern"] = in_dialect(part["pattern"])
        named = part.get("patternProperties")
        if isinstance(named, Mapping):
            part["patternProperties"] = {in_dialect(key): each for key, each in named.items()}
        kind = part.get("type")
        if isinstance(kind, str):
            part["type"] = OTHER_NAMES.get(kind, kind)
        for key in ("minimum", "exclusiveMinimum"):
            if _is_number(part.get(key)):
                part[key] = max(part[key], -MOST)
        for key in ("maximum", "exclusiveMaximum"):
            if _is_number(part.get(key)):
                part[key] = min(part[key], MOST)
    leave_out_no_effect(schema)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _replace_look_ahead(part: dict[str, Any], pattern: str) -> None:
    patterns = without_look_ahead(pattern)
    others = part.get("allOf", [])
    if patterns is None or not isinstance(others, list):
        return
    part["pattern"] = patterns[0]
    if patterns[1:]:
        part["allOf"] = [*others, *({"pattern": each} for each in patterns[1:])]


def _replace_names(part: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Replace ``propertyNames`` by properties, or by ``patternProperties``."""
    names = resolve(part.get("propertyNames"), root)
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return
    keys = names.keys() - _NOTES
    properties = part.get("properties", {})
    values = part.get("additionalProperties", {})
    if not keys:
        del part["propertyNames"]
    elif "patternProperties" in part or not isinstance(properties, Mapping):
        return
    elif (allowed := _listed(names)) is not None and keys <= {"enum", "const"}:
        own = {name: each for name, each in properties.items() if name in allowed}
        part["properties"] = {**own, **{name: values for name in allowed if name not in own}}
        part["additionalProperties"] = False
        del part["propertyNames"]
    elif (pattern := _pattern_of(names)) is not None and not properties:
        part["patternProperties"] = {pattern: values}
        part["additionalProperties"] = False
        del part["propertyNames"]


def _listed(names: Mapping[str, Any]) -> list[str] | None:
    """Return the names that a value of ``propertyNames`` lists; None if it lists no names."""
    found = [names["const"]] if "const" in names else names.get("enum")
    is_list = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return found if is_list else None


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """Return a pattern for the names that a value of ``propertyNames`` allows; None if there is no
    such pattern.
    """
    keys = names.keys() - _NOTES
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        found = without_look_ahead(names["pattern"])
        return found[0] if found and len(found) == 1 else None
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if keys <= {"minLength", "maxLength"} and isinstance(least, int):
        return f"^{ANY}{{{least},{most}}}$"
    return None
