"""The facts about layers of linear attention are read from config.json. The number of bytes of a
state is computed from these facts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import ParallelConfig
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.linear_spec import LinearSpec, read_linear_spec
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.weight_sizes import weight_parts

# The sizes of Qwen3-Next-80B-A3B.
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEXT_80B = NEXT | {
    "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
}  # fmt: skip
MIB = 1 << 20


def read(directory: Path, **keys: Any) -> LinearSpec:
    (directory / "config.json").write_text(json.dumps({**NEXT, **keys}))
    linear = read_linear_spec(read_model_config(directory))
    assert linear is not None
    return linear


def test_every_fourth_layer_has_full_attention(tmp_path: Path) -> None:
    linear = read(tmp_path)

    assert len(linear.layers) == 36
    assert sorted(set(range(8)) - linear.layers) == [3, 7]
    assert read(tmp_path, full_attention_interval=2).layers == frozenset(range(0, 48, 2))


def test_layer_types_name_each_layer(tmp_path: Path) -> None:
    types = ["full_attention", "linear_attention"] * 24

    assert read(tmp_path, layer_types=types).layers == frozenset(range(1, 48, 2))


def test_a_state_of_qwen3_next_takes_38_mib_in_bfloat16_and_74_with_float32_matrices(
    tmp_path: Path,
) -> None:
    linear = read(tmp_path)

    assert linear.num_channels == 8192
    assert round(36 * linear.state_bytes(1, "bfloat16", 2) / MIB, 1) == 37.7
    assert round(36 * linear.state_bytes(1, "float16", 2) / MIB, 1) == 73.7
    assert linear.state_bytes(4, "bfloat16", 2) * 4 == linear.state_bytes(1, "bfloat16", 2)


def test_qwen3_next_has_80_billion_parameters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NEXT_80B))

    parts = dict(weight_parts(read_model_spec(tmp_path), tp=1, ep=1, element_bytes=1))

    assert round(sum(parts.values()) / 1e9) == 80
    assert round(parts["linear attention"] / 36 / 1e6, 1) == 33.8


def test_only_qwen3_next_stores_head_by_head(tmp_path: Path) -> None:
    assert read(tmp_path).has_grouped_weights
    assert not read(tmp_path, architectures=["Qwen3_5ForCausalLM"]).has_grouped_weights


def test_a_model_without_these_keys_has_no_linear_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')

    assert read_linear_spec(read_model_config(tmp_path)) is None


@pytest.mark.parametrize(
    ("error", "message", "keys"),
    [
        (ModelError, "linear_num_value_heads is 24; it must be a multiple",
         {"linear_num_value_heads": 24}),
        (ModelError, "layer_types has 1 entries", {"layer_types": ["full_attention"]}),
        (ModelError, "linear_conv_kernel_dim is 1", {"linear_conv_kernel_dim": 1}),
        (UnsupportedModelError, "'sliding_attention'", {"layer_types": ["sliding_attention"] * 48}),
        (UnsupportedModelError, "are 64 and 128; .* take 128 only", {"linear_key_head_dim": 64}),
    ],
)  # fmt: skip
def test_impossible_values_are_refused(
    tmp_path: Path, error: type[Exception], message: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, **keys)


@pytest.mark.parametrize(
    ("parallel", "num_drafts", "message"),
    [
        ({"tp": 3}, 0, "parallel.tp is 3: it must divide"),
        ({"tp": 2, "dcp": 2}, 0, "parallel.dcp is 2 .* one state per request"),
        ({"pcp": 2}, 0, "parallel.pcp 2; .* one state per request"),
        ({}, 8, "speculative.num_tokens is 8; .* up to 7 drafts: lower it"),
    ],
)
def test_deployments_that_cannot_keep_states_are_refused(
    tmp_path: Path, parallel: dict[str, int], num_drafts: int, message: str
) -> None:
    linear = read(tmp_path)
    linear.check(ParallelConfig(tp=16), 7)

    with pytest.raises(ConfigError, match=message):
        linear.check(ParallelConfig(**parallel), num_drafts)


@pytest.mark.parametrize(
    ("tp", "heads", "message"),
    [(3, 32, "parallel.tp is 3: it must divide the 16 key heads"),
     (1, 128, "128 value heads .* take up to 64: raise parallel.tp")],
)  # fmt: skip
def test_ranks_that_do_not_fit_the_heads_are_refused(
    tmp_path: Path, tp: int, heads: int, message: str
) -> None:
    linear = read(tmp_path, linear_num_value_heads=heads)

    with pytest.raises(ConfigError, match=message):
        linear.state_bytes(tp, "bfloat16", 2)
