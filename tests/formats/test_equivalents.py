from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.formats.equivalents import use_equivalents
from dist_aclgraph.formats.look_ahead import without_look_ahead
from dist_aclgraph.sampling import StructuredOutputs
from tests.formats.walk import Walk

EMAIL = (  # as zod writes it
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic writes it
MONEY = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
PATTERNS = (
    *(EMAIL, DECIMAL, MONEY, r"^a+$", r"^(?!a)b?c*$", r"^(?=.*b)[abc]+$", r"^(?!ab)", r"^(?!$)a*$"),
    *(r"^(?!ab$)[abc]*$", r"^(?!a|bc)[abc]+$", r"^(?!(?:a|bc)$)[abc]+$", r"^(?!.*a)[abc]+$"),
    *(r"^(?!\d)[\w.]+$", r"^(?![^a])[abc]+$", r"^(?!a+$)[ab]+$", r"^(?=a)(?!.*bb)[ab.]+$"),
    *(r"^(?!ab)(?:c|a)", r"^(?!(a|b))c?", r"^(?!b|\.).a"),
)
UNUSABLE = (
    r"^(?!a.|b)c",
    r"a(?=b)",
    r"^(?!a*b)c",
    r"^(?!a)b|c",
    r"^(?!a.*b)a",
    r"^(?<=a)b",
    r"^(?!(a)\1)b",
    "^(?!a",
)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("abc.@+-01_'", max_size=9))
def test_a_pattern_without_look_aheads_means_the_same(pattern, text):
    found = without_look_ahead(pattern)

    assert found is not None
    assert all(re.search(each, text) for each in found) == bool(re.search(pattern, text))
    assert not any(re.search(r"\(\?[=!]", each) for each in found)


@pytest.mark.parametrize("pattern", UNUSABLE)
def test_other_patterns_are_not_replaced(pattern):
    assert without_look_ahead(pattern) is None


def allows(schema, value) -> bool:
    walk = Walk("hermes", {})
    return walk.allows(StructuredOutputs(json=json.dumps(schema)), walk.tokens(json.dumps(value)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "email", "pattern": EMAIL}, ["a.b@c.de"], [".a@c.de", "a..b@c.de", "a.@c.de"]),
        ({"format": "time", "pattern": r"^[0-2]\d:[0-5]\d$"}, ["10:30"], ["10:30:00Z", "x"]),
        ({"format": "time"}, ["10:30:00Z"], ["10:30"]),
        ({"pattern": DECIMAL}, ["-1.50", "0", ".5"], ["", "-", ".", "1e5"]),
        ({"pattern": MONEY}, ["12.34", "-1.5"], ["", "+."]),
        (
            {"pattern": "^(?!ab)", "allOf": [{"pattern": "c$"}]},
            ["ac", "c"],
            ["abc", "a"],
        ),
    ],
)
def test_strings_follow_patterns_with_look_aheads(schema, good, bad):
    schema = {"type": "object", "properties": {"a": {"type": "string", **schema}}}

    assert [text for text in good if not allows(schema, {"a": text})] == []
    assert [text for text in bad if allows(schema, {"a": text})] == []


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"type": "string"}, [{}, {"x y": 1}], [{"a": "b"}]),
        ({"enum": ["a", "b"]}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
        ({"$ref": "#/$defs/E"}, [{"a": 1}], [{"c": 1}]),
        ({"const": "a"}, [{"a": 1}], [{"b": 1}]),
        ({"type": "string", "pattern": "^[a-c]+$"}, [{}, {"ab": 1}], [{"d": 1}, {"a": "x"}]),
        ({"minLength": 2}, [{"ab": 1}], [{"a": 1}]),
        ({"minLength": 1, "maxLength": 2}, [{"a": 1, "bb": 2}], [{"abc": 1}, {"": 1}]),
    ],
)
def test_names_of_properties_follow_their_schema(names, good, bad):
    schema = {
        "$defs": {"E": {"type": "string", "enum": ["a", "b"]}},
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
    }

    assert [value for value in good if not allows(schema, value)] == []
    assert [value for value in bad if allows(schema, value)] == []


def test_listed_names_keep_the_schemas_of_their_properties():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "d": {}},
        "propertyNames": {"enum": ["b", "a"]},
        "required": ["a"],
    }

    assert allows(schema, {"a": "x", "b": [1]})
    assert not allows(schema, {"a": 1})
    assert not allows(schema, {"b": 1})
    assert not allows(schema, {"a": "x", "d": 1})


@pytest.mark.parametrize("nothing", [{}, True])
def test_a_schema_that_excludes_every_value_forbids_the_property(nothing):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"not": nothing}},
        "additionalProperties": {"not": nothing},
    }

    assert allows(schema, {"a": 1})
    assert not allows(schema, {"a": 1, "b": 1})
    assert not allows(schema, {"c": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
        {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}},
        {"propertyNames": {"format": "uuid"}},
        {"propertyNames": False},
        {"propertyNames": {"$ref": "#/$defs/missing"}},
        {"propertyNames": {"enum": "a"}},
        {"pattern": "a(?=b)"},
        {"pattern": "^(?!a)b", "allOf": {}},
        {"pattern": 5},
        {"const": {"not": {}, "propertyNames": {}, "pattern": "^(?!a)b"}},
    ],
)
def test_other_keywords_stay(schema):
    before = json.dumps(schema)

    use_equivalents(schema)

    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("least", "most"),
    [
        (-(2**63), 2**63 - 1),
        (-(2**63), 0),
        (0, 2**64 - 1),
        (-3.4028234663852886e38, 3.4028234663852886e38),
        (-1.7976931348623157e308, 5),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_limits_of_machine_numbers_may_be_large(kind, least, most):
    for names in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
        schema = {"type": kind, **dict(zip(names, (least, most), strict=True))}

        for value in (-(10**18), -1, 1, 10**18):
            assert allows(schema, value) == (least <= value <= most)
        assert not allows(schema, 10**400)


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        ("int", 5, 2.5),
        ("float", 2.5, "2.5"),
        ("bool", True, "true"),
        ("str", "a", 1),
        ("list", [1], {}),
    ],
)
def test_other_names_of_types_are_read(kind, value, other):
    schema = {"type": "object", "properties": {"type": {"type": kind}}, "required": ["type"]}

    assert allows(schema, {"type": value})
    assert not allows(schema, {"type": other})
