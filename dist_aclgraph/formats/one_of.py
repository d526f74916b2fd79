"""Finds out whether ``oneOf`` in a JSON schema may be read as ``anyOf``.

llguidance supports only ``anyOf``. ``anyOf`` allows a value that matches two branches, but
``oneOf`` does not. Both keywords mean the same if no value can match two branches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dist_aclgraph.formats.typed_values import resolve, types_of

MAX_BRANCHES = 256
# Two sets of keywords. The value of a keyword in NAMED maps names to schemas. The value of a
# keyword in DATA is data and not a schema.
NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
DATA = {"const", "enum", "default", "examples"}


def is_any_of(schema: Any) -> bool:
    """Return whether each ``oneOf`` within a schema means the same as ``anyOf``."""
    one_ofs = (part["oneOf"] for part in parts_of(schema) if "oneOf" in part)
    return all(exclude_each_other(branches, schema) for branches in one_ofs)


def parts_of(schema: Any) -> Iterator[Any]:
    """Yield a schema, and then all schemas within it. The schemas true and false are left out."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            for key, value in part.items():
                if key in NAMED and isinstance(value, Mapping):
                    stack += value.values()
                elif key not in DATA:
                    stack.append(value)
        elif isinstance(part, list):
            stack += part


class _Branch:
    """The restrictions of a branch of ``oneOf``. They can show that two branches allow no common
    value.

    Attributes:
        types: names of the types that the branch allows; empty if the branch does not restrict
            types.
        values: the only values that the branch allows; None if the branch does not list values.
        tags: maps the names of required properties to the only values that these properties allow.
    """

    def __init__(self, schema: Any, root: Any) -> None:
        schema = resolve(schema, root)
        self.types = types_of(schema, root)
        self.values = _values(schema)
        found = {
            name: _values(resolve(_property(schema, name), root)) for name in _required(schema)
        }
        self.tags = {name: values for name, values in found.items() if values is not None}

    def excludes(self, other: _Branch) -> bool:
        """Return whether no value matches both branches."""
        if not self.types or not other.types:
            return False
        kinds, others = self.types, other.types
        if "number" in kinds | others:
            kinds, others = (
                each | {"number"} if "integer" in each else each for each in (kinds, others)
            )
        if not kinds & others:
            return True
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        return kinds == others == {"object"} and any(
            not self.tags[name] & other.tags[name] for name in self.tags.keys() & other.tags.keys()
        )


def exclude_each_other(branches: Any, root: Any) -> bool:
    """Return whether no value matches two of the branches of ``oneOf``."""
    if not isinstance(branches, list) or len(branches) > MAX_BRANCHES:
        return False
    found = [_Branch(branch, root) for branch in branches]
    return all(one.excludes(other) for one, other in combinations(found, 2))


def _values(schema: Any) -> set[str] | None:
    """Return the only values that a schema allows; None if the schema does not list values."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {_canonical(schema["const"])}
    values = schema.get("enum")
    return {_canonical(value) for value in values} if isinstance(values, list) else None


def _canonical(value: Any) -> str:
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """Return a value in which floats without a fraction are integers, because 1.0 equals 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _with_integers(each) for key, each in value.items()}
    return value


def _required(schema: Any) -> list[str]:
    found = schema.get("required") if isinstance(schema, Mapping) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _property(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None
