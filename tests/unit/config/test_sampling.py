"""Sampling parameters: their limits, their spellings, and the values that are derived from them."""

from __future__ import annotations

import math

import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import MIN_TEMPERATURE, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("seed", 2**63),
        ("logprobs", 21),
        ("stop", ("x",) * 21),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(129))),
        ("min_tokens", -1),
    ],
)
def test_a_value_out_of_range_names_its_parameter(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})

    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", None),
        ("temperature", 0),
        ("temperature", 2.0),
        ("top_k", -1),
        ("top_p", 1.0),
        ("seed", -(2**63)),
        ("logprobs", 0),
        ("presence_penalty", -2.0),
    ],
)
def test_the_ends_of_a_range_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_min_tokens_may_be_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(InvalidParameterError, match=r"max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_one_stop_string_may_come_without_a_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_temperatures_near_zero_are_greedy_or_raised() -> None:
    assert SamplingParams(temperature=1e-6).is_greedy
    raised = SamplingParams(temperature=0.001)
    assert not raised.is_greedy and raised.temperature == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_penalties_are_noticed(params: dict[str, float], expected: bool) -> None:
    assert SamplingParams(**params).has_penalties is expected


@pytest.mark.parametrize("value", [5, "json", {}, {"json": {}, "regex": "a"}, {"schema": {}}])
def test_an_output_format_has_exactly_one_of_its_fields(value: object) -> None:
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs=value)  # type: ignore[arg-type]


def test_a_copy_is_checked_again() -> None:
    params = SamplingParams(top_k=3)
    copy = params.clone()
    copy.top_k = 5

    assert (params.top_k, copy.clone().top_k) == (3, 5)
    copy.top_k = -7
    with pytest.raises(InvalidParameterError, match="top_k"):
        copy.clone()
