"""Rotary tables and frequencies are compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_aclgraph.layers.rotary import (
    inverse_frequencies,
    pad_tables,
    pairs_across_head,
    rope_tables,
)
from dist_aclgraph.planning.step_sizes import SPARE_POSITIONS
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import LINEAR_ROPE, LLAMA3_ROPE, MAX_LEN, YARN_ROPE, make_reference

DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 32 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
    "original_max_position_embeddings": 128,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
SCHEMES = {
    "default": DEFAULT,
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-untruncated": {**YARN_ROPE, "truncate": False, "beta_fast": 16.0},
    "yarn-factor": {**YARN_ROPE, "attention_factor": 0.7},
    "yarn-mscale": {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.5},
    "longrope": LONG_ROPE,
}
# Older keys of config.json, which stand in place of rope_parameters or beside it.
KEYS: dict[str, dict[str, Any]] = {
    "older": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "older-wins": {"rope_scaling": YARN_ROPE, "rope_parameters": LINEAR_ROPE},
    "older-is-empty": {"rope_scaling": {}, "rope_parameters": LINEAR_ROPE},
    "theta-within-wins": {"rope_theta": 5e5, "rope_scaling": LINEAR_ROPE},
    "original-beside-wins": {"rope_scaling": YARN_ROPE, "original_max_position_embeddings": 64},
    "original-of-llama3-beside": {
        "rope_parameters": LLAMA3_ROPE,
        "original_max_position_embeddings": 32,
    },
    "no-original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "no-factor": {"rope_scaling": {**YARN_ROPE, "factor": None}},
    "no-beta": {"rope_scaling": {**YARN_ROPE, "beta_fast": 0, "beta_slow": 0}},
    "long": {"rope_scaling": LONG_ROPE},
    "long-no-original": {
        "rope_scaling": {**LONG_ROPE, "original_max_position_embeddings": None},
        "original_max_position_embeddings": 96,
    },
    "long-factor": {"rope_scaling": {**LONG_ROPE, "factor": 8.0}},
    "long-attention": {"rope_scaling": {**LONG_ROPE, "attention_factor": 1.5}},
    "dynamic": {"rope_scaling": DYNAMIC_ROPE},
    "dynamic-triple": {"rope_parameters": {**DYNAMIC_ROPE, "factor": 3}},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_equal_those_of_transformers(npu: Any, tmp_path: Path, scheme: str) -> None:
    model = make_reference("Qwen3ForCausalLM", tmp_path, rope_parameters=SCHEMES[scheme])
    spec = read_model_spec(tmp_path)

    cos, sin = rope_tables(spec.rope, spec.head_dim, 512, torch.float32)

    positions = torch.arange(512 + SPARE_POSITIONS)[None]
    expected_cos, expected_sin = model.model.rotary_emb(torch.zeros(1), positions)
    torch.testing.assert_close(cos, expected_cos[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected_sin[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [2, 16, 24, 32])
def test_one_rotation_of_whole_heads_rotates_the_first_elements(dim: int) -> None:
    heads, head_dim = torch.randn(5, 3 * 32), 32
    angles = torch.rand(5, 1, dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    ordered = pairs_across_head(heads, head_dim, dim).view(5, 3, head_dim)
    found = rotated(ordered, *pad_tables(cos, sin, head_dim))

    first, rest = heads.view(5, 3, head_dim).split([dim, head_dim - dim], -1)
    expected = torch.cat([rotated(first, cos, sin), rest], -1)
    wanted = pairs_across_head(expected.flatten(1), head_dim, dim).view(5, 3, head_dim)
    torch.testing.assert_close(found, wanted)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@pytest.fixture(scope="module")
def published(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a config.json from which the keys of the rotary embedding are removed."""
    directory = tmp_path_factory.mktemp("published")
    make_reference("Qwen3ForCausalLM", directory)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return {key: value for key, value in config.items() if not key.startswith("rope")}


@pytest.mark.parametrize("length", [100, 2 * MAX_LEN])
@pytest.mark.parametrize("keys", KEYS)
def test_rope_keys_and_lengths_give_the_same_frequencies_as_in_transformers(
    published: dict[str, Any], tmp_path: Path, keys: str, length: int
) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    (tmp_path / "config.json").write_text(json.dumps({**published, **KEYS[keys]}))
    theirs = AutoConfig.from_pretrained(tmp_path)
    make = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    expected, expected_factor = make(theirs, torch.device("cpu"), seq_len=length)

    spec = read_model_spec(tmp_path)
    found, factor = inverse_frequencies(spec.rope, spec.head_dim, length)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor)
