"""``oneOf`` in JSON schemas: whether at most one branch can match, so that it means ``anyOf``.

llguidance knows ``anyOf`` only. A value that matches two branches of ``oneOf`` is invalid, so
``oneOf`` may be read as ``anyOf`` only where no value matches two branches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dist_aclgraph.formats.typed_values import resolve, types_of

MAX_BRANCHES = 256


def is_any_of(schema: Any) -> bool:
    """Return whether each ``oneOf`` within a schema means the same as ``anyOf``."""
    return all(_excludes(branches, schema) for branches in _one_ofs(schema))


def _one_ofs(part: Any) -> Iterator[Any]:
    stack = [part]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            if "oneOf" in part:
                yield part["oneOf"]
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _excludes(branches: Any, root: Any) -> bool:
    """Return whether no value matches two of the branches."""
    if not isinstance(branches, list) or len(branches) > MAX_BRANCHES:
        return False
    found = [resolve(branch, root) for branch in branches]
    return all(_are_disjoint(one, other, root) for one, other in combinations(found, 2))


def _are_disjoint(one: Any, other: Any, root: Any) -> bool:
    kinds, others = types_of(one, root), types_of(other, root)
    if not kinds or not others:
        return False
    if "number" in kinds | others:
        kinds, others = (
            each | {"number"} if "integer" in each else each for each in (kinds, others)
        )
    if not kinds & others:
        return True
    mine, theirs = _values(one), _values(other)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if kinds == others == {"object"}:
        shared = set(_required(one)) & set(_required(other))
        for name in shared:
            mine = _values(resolve(_property(one, name), root))
            theirs = _values(resolve(_property(other, name), root))
            if mine is not None and theirs is not None and not mine & theirs:
                return True
    return False


def _values(schema: Any) -> set[str] | None:
    """Return the only values that a schema allows; None if it does not list them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {_canonical(schema["const"])}
    values = schema.get("enum")
    return {_canonical(value) for value in values} if isinstance(values, list) else None


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _required(schema: Any) -> list[str]:
    found = schema.get("required") if isinstance(schema, Mapping) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _property(schema: Any, name: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(name) if isinstance(properties, Mapping) else None
