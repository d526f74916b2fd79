"""Supported formats of quantised checkpoints are read, and all other formats are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from tests.unit.shapes.test_model_spec import V3

# ``quantization_config`` of each format, as tools write it.
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}
INPUTS = WEIGHTS | {"dynamic": True, "observer": None, "strategy": "token"}
INT4 = WEIGHTS | {"num_bits": 4, "strategy": "group", "group_size": 32}
INT4_OF_256 = INT4 | {"group_size": 256}
DESCRIPTION = {
    "model_quant_type": "W8A8_DYNAMIC",
    "version": "1.0.0",
    "model.embed_tokens.weight": "FLOAT",
    "model.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC",
    "model.layers.0.mlp.up_proj.weight_scale": "W8A8_DYNAMIC",
    "model.layers.0.mlp.up_proj.weight_offset": "W8A8_DYNAMIC",
}
# SpinQuant rotates the inputs of down_proj while the model runs.
ROTATED = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}
W4A16 = {"group_size": 128, "model.layers.1.q.weight": "W4A16"}
W4A8 = {"group_size": 0, "model.layers.1.q.weight": "W4A8_DYNAMIC"}


def compressed(
    weights: dict[str, Any] = WEIGHTS, inputs: dict[str, Any] | None = INPUTS, **changes: Any
) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes


def write(directory: Path, quantisation: Any, description: str | None = None) -> None:
    config = V3 | {"quantization_config": quantisation}
    (directory / "config.json").write_text(json.dumps(config))
    if description is not None:
        (directory / "quant_model_description.json").write_text(description)


def packed(weights: dict[str, Any] = INT4, **changes: Any) -> dict[str, Any]:
    return compressed(weights, None, **{"format": "pack-quantized"} | changes)


@pytest.mark.parametrize(
    "quantisation",
    [
        None,
        {},
        FP8,
        compressed(),
        packed(),
        packed(INT4 | {"actorder": "static"}),
        compressed(INT4, None),
        compressed(INT4_OF_256),
        compressed(WEIGHTS | {"num_bits": 4}),
        compressed(transform_config={}),
        compressed(transform_config={"config_groups": {}}),
    ],
)
@pytest.mark.parametrize("described", [{}, W4A16, W4A8, W4A8 | {"group_size": 256}])
def test_supported_quantised_formats_keep_the_models_shape(
    tmp_path: Path, quantisation: Any, described: dict[str, Any]
) -> None:
    write(tmp_path, quantisation, json.dumps(DESCRIPTION | described))

    assert read_model_spec(tmp_path).hidden_size == 7168


@pytest.mark.parametrize(
    ("quantisation", "what"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        (FP8 | {"weight_block_size": None}, "weight_block_size None"),
        (FP8 | {"weight_block_size": [64, 128]}, "weight_block_size [64, 128]"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (compressed(format="pack-quantized"), "format 'pack-quantized'"),
        (compressed(WEIGHTS | {"num_bits": 3}), "num_bits 3 for weights of group_0"),
        (compressed(INT4 | {"symmetric": False}, None), "symmetric False for weights"),
        (packed(INT4 | {"type": "float"}), "type 'float' for weights of group_0"),
        (packed(INT4 | {"group_size": 48}), "group_size 48 for weights of group_0"),
        (packed(INT4 | {"strategy": "channel"}), "strategy 'channel' with group_size 32"),
        (packed(INT4 | {"actorder": "group"}), "actorder 'group' for weights"),
        (packed(format="marlin-24"), "format 'marlin-24' of group_0"),
        (compressed(INT4_OF_256 | {"group_size": 128}), "group_size 128 for weights of group_0"),
        (compressed(INT4_OF_256, INPUTS | {"dynamic": False}), "dynamic False for input_act"),
        (compressed(WEIGHTS | {"type": "float"}), "type 'float' for weights"),
        (compressed(WEIGHTS | {"strategy": "group"}), "strategy 'group' for weights"),
        (compressed(WEIGHTS | {"symmetric": False}), "symmetric False for weights"),
        (compressed(inputs=INPUTS | {"dynamic": False}), "dynamic False for input_activations"),
        (compressed(inputs=INPUTS | {"strategy": "tensor"}), "strategy 'tensor' for input_act"),
        (compressed(inputs=None), "num_bits None for input_activations of group_0"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "a kv_cache_scheme"),
        (compressed(transform_config=ROTATED), "a transform_config with 'R4'"),
    ],
)
def test_other_quantisation_is_refused_with_what_is_supported(
    tmp_path: Path, quantisation: Any, what: str
) -> None:
    write(tmp_path, quantisation)

    with pytest.raises(UnsupportedModelError) as error:
        read_model_spec(tmp_path)

    assert what in str(error.value)
    for supported in ("compressed-tensors", "fp8 in blocks of 128 x 128", "W4A16 and FLOAT in"):
        assert supported in str(error.value)


def test_a_described_tensor_of_another_kind_is_named(tmp_path: Path) -> None:
    write(tmp_path, None, json.dumps(DESCRIPTION | {"model.layers.1.q.weight": "W8A8"}))

    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.q\.weight in W8A8; supp"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    "described", [W4A16 | {"group_size": 48}, W4A8 | {"group_size": 128}], ids=["W4A16", "W4A8"]
)
def test_described_groups_that_no_operator_takes_are_refused(
    tmp_path: Path, described: dict[str, Any]
) -> None:
    write(tmp_path, None, json.dumps(DESCRIPTION | described))

    with pytest.raises(UnsupportedModelError, match=rf"W4A.* group_size {described['group_size']}"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "3", '["a"]'])
def test_a_description_that_is_none_is_an_error_of_the_model(tmp_path: Path, text: str) -> None:
    write(tmp_path, None, text)

    with pytest.raises(ModelError, match=r"quant_model_description\.json (is not|must hold)"):
        read_model_spec(tmp_path)
