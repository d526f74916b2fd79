from __future__ import annotations

import json

import pytest

from dist_aclgraph.formats.choice import FORMATS
from dist_aclgraph.formats.no_effect import leave_out_no_effect
from dist_aclgraph.sampling import StructuredOutputs
from tests.formats.walk import Walk


@pytest.mark.parametrize(
    "keyword",
    [
        {"format": "binary"},
        {"format": "my-format"},
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": {}},
        {"unevaluatedProperties": True},
        {"dependentRequired": {}},
        {"$id": "Output Format"},  # griptape writes this id, to which no schema can refer
        {"$id": "größe"},
        {"$schema": "draft 7"},
        {"required": None, "properties": None, "enum": None, "items": None, "$ref": None},
    ],
)
def test_keywords_that_allow_every_value_are_left_out(keyword):
    schema = {"properties": {"a": {"type": "string", **keyword}, "format": {"format": "date"}}}
    walk = Walk("hermes", {})

    form = StructuredOutputs(json=json.dumps(schema))
    assert walk.allows(form, walk.tokens('{"a": "x", "format": "2026-01-02"}'))
    assert not walk.allows(form, walk.tokens('{"a": 1}'))
    assert not walk.allows(form, walk.tokens('{"format": "x"}'))


@pytest.mark.parametrize("name", FORMATS)
def test_tools_may_have_such_keywords(name):
    tools = {"f": {"type": "object", "properties": {"a": {"type": "integer", "not": False}}}}
    walk = Walk(name, tools)
    form = walk.form.structured(None, tools, set(tools), is_required=True)

    assert form is not None
    walk.matcher(form)  # has no error


def test_data_and_keywords_with_an_effect_stay():
    schema = {
        "default": None,
        "anyOf": [{"const": None}],
        "const": {"not": False, "type": None},
        "not": {"type": "string"},
        "uniqueItems": True,
        "format": "regex",
        "properties": {"uniqueItems": False, "$id": {"const": "a b"}},
        "$id": "https://example.org/a%20b?c=[1]#d",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }
    before = json.dumps(schema)

    leave_out_no_effect(schema)

    assert json.dumps(schema) == before


PAIR = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({**PAIR, "minProperties": 0}, PAIR),
        ({**PAIR, "maxProperties": 2}, PAIR),
        ({**PAIR, "required": ["a"], "minProperties": 1}, {**PAIR, "required": ["a"]}),
        ({"required": ["a", "a"], "minProperties": 2}, None),
        ({**PAIR, "minProperties": 1}, None),
        ({**PAIR, "maxProperties": 1}, None),
        ({"properties": {"a": {}}, "maxProperties": 1}, None),
        ({**PAIR, "patternProperties": {"c": {}}, "maxProperties": 2}, None),
        ({"properties": {"minProperties": {}}, "required": ["minProperties"]}, None),
    ],
)
def test_numbers_of_properties_that_the_schema_implies_have_no_effect(schema, left):
    found = json.loads(json.dumps(schema))

    leave_out_no_effect(found)

    assert found == (schema if left is None else left)
