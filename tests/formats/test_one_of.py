from __future__ import annotations

import pytest

from dist_aclgraph.formats.one_of import is_any_of


def of(*branches, **more):
    return {"properties": {"x": {"oneOf": list(branches)}}, **more}


def kind(value):
    properties = {"kind": {"const": value}, "n": {"type": "integer"}}
    return {"type": "object", "properties": properties, "required": ["kind"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"oneOf": {"type": "string"}}},
        {"$defs": {"oneOf": {"properties": {"properties": {"type": "integer"}}}}},
        {"const": {"oneOf": [1, 1]}, "default": {"oneOf": 1}, "examples": [{"oneOf": 1}]},
        of({"type": "string"}, {"type": "null"}),
        of({"type": "integer"}, {"type": "string"}, {"type": "object"}),
        of(kind("a"), kind("b")),
        of({"const": 1}, {"const": 2}),
        of({"enum": ["a", "b"]}, {"enum": ["c"]}),
        of({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, **{"$defs": {"a": kind(1), "b": kind(2)}}),
    ],
)
def test_branches_that_exclude_each_other_are_alternatives(schema):
    assert is_any_of(schema)


@pytest.mark.parametrize(
    "schema",
    [
        of({"type": "integer"}, {"minimum": 2}),
        of({"type": "integer"}, {"type": "number"}),
        of({"const": 1}, {"const": 1.0}),
        of(kind("a"), kind("a")),
        of(kind("a"), {"type": "object"}),
        of({"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2}),
        of({"$ref": "#/$defs/none"}, {"type": "string"}),
        of({"anyOf": [{"type": "string"}, {}]}, {"type": "integer"}),
        of({"const": [1]}, {"const": [1.0]}),
        {"properties": {"properties": {"oneOf": [True, True]}}},
        {"oneOf": [True, True]},
        {"oneOf": {}},
    ],
)
def test_branches_that_may_both_match_are_not(schema):
    assert not is_any_of(schema)


def test_the_time_does_not_grow_with_the_number_of_paths():
    """The process that serves HTTP checks the schemas of tools. A slow check would delay all
    requests.
    """
    paths = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 999} for i in range(9)}
    schema = of({"$ref": "#/$defs/a0"}, {"type": "string"}, **{"$defs": paths})

    assert not is_any_of(schema)  # there are 999 ** 9 paths through the schema
