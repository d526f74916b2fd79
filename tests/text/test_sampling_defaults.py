from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ModelError
from dist_aclgraph.text.sampling_defaults import read_sampling_defaults

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}


def described(directory: Path, generation: object, **keys: str) -> Config:
    (directory / "config.json").write_text("{}")
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return Config.model_validate({"model": str(directory), **keys})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"temperature": None, "min_p": 0.1}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.05, "max_new_tokens": 9, "top_k": 0},
         {"repetition_penalty": 1.05, "max_tokens": 9, "top_k": 0}),
        ({"top_k": 50.0, "max_new_tokens": 64.0, "temperature": 1.0},
         {"top_k": 50, "max_tokens": 64, "temperature": 1.0}),
        ({}, {}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_generation_config(tmp_path, generation, expected):
    assert read_sampling_defaults(described(tmp_path, generation)) == expected


def test_sampling_defaults_can_be_turned_off(tmp_path):
    assert read_sampling_defaults(described(tmp_path, QWEN, sampling_defaults="none")) == {}


def test_a_value_out_of_range_is_named_with_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p is 7.*=none"):
        read_sampling_defaults(described(tmp_path, {"top_p": 7}))
