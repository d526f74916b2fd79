"""Leaves out keywords of a JSON schema that allow every value, because llguidance refuses them."""

from __future__ import annotations

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
# Values of keywords with which they allow every value.
NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}


def leave_out_no_effect(schema: dict[str, Any]) -> None:
    """Remove keywords that allow every value, and formats that JSON Schema does not define."""
    for part in parts_of(schema):
        for key, values in NOTHING.items():
            if part.get(key) in values:
                del part[key]
        found = part.get("format")
        if isinstance(found, str) and found not in FORMATS:
            del part["format"]
