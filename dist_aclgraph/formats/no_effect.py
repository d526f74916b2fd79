"""Leaves out JSON schema keywords that allow every value, because llguidance refuses them."""

from __future__ import annotations

import re
from typing import Any

from dist_aclgraph.formats.one_of import parts_of

# Formats of JSON Schema, draft 2020-12. llguidance checks or refuses them. All other formats, such
# as ``binary`` or ``password``, are only notes for readers.
FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
# For each keyword, the values that restrict nothing.
NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
MAY_BE_NULL = {"const", "default"}
# Some programs write a title or a name into these keywords. If the value is not a URI reference
# (RFC 3986), no ``$ref`` can refer to it.
IDS = ("$id", "$schema")
_URI = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")


def leave_out_no_effect(schema: dict[str, Any]) -> None:
    """Remove keywords that allow every value, formats that JSON Schema does not define, and ids
    that are not URIs. Also remove keywords whose value is null, because some programs write null
    for an absent keyword.
    """
    for part in parts_of(schema):
        for key in [key for key in part if part[key] is None and key not in MAY_BE_NULL]:
            del part[key]
        for key, values in NOTHING.items():
            if part.get(key) in values:
                del part[key]
        _leave_out_counts(part)
        found = part.get("format")
        if isinstance(found, str) and found not in FORMATS:
            del part["format"]
        for key in IDS:
            name = part.get(key)
            if isinstance(name, str) and not _URI.fullmatch(name):
                del part[key]


def _leave_out_counts(part: dict[str, Any]) -> None:
    """Remove ``minProperties`` if ``required`` implies it, and ``maxProperties`` if ``properties``
    implies it.
    """
    required, properties = part.get("required", []), part.get("properties", {})
    least, most = part.get("minProperties"), part.get("maxProperties")
    is_sure = isinstance(required, list) and isinstance(properties, dict)
    if is_sure and isinstance(least, int) and least <= len(set(map(str, required))):
        del part["minProperties"]
    is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
    if is_sure and is_closed and isinstance(most, int) and most >= len(properties):
        del part["maxProperties"]
