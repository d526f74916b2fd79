"""The supported formats of quantised checkpoints, as config.json and its companion file describe
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import UnsupportedModelError
from dist_aclgraph.shapes.json_files import read_json_object
from dist_aclgraph.shapes.model_config import ModelConfig

DESCRIPTION = "quant_model_description.json"  # from Ascend's tool: types of all tensors
DESCRIBED = ("W8A8_DYNAMIC", "FLOAT")
FP8 = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_INPUTS = {**INT8_WEIGHTS, "strategy": "token", "dynamic": True}
MXFP4_REMEDY = (
    "load the model in transformers with Mxfp4Config(dequantize=True), save it in bfloat16, and "
    "serve the saved checkpoint"
)
SUPPORTED = (
    "supported: compressed-tensors with symmetric int8 weights by channel and dynamic int8 "
    "activations by token; fp8 in blocks of 128 x 128 with dynamic activations; "
    f"{' and '.join(DESCRIBED)} in {DESCRIPTION}"
)


def check_quantisation(config: ModelConfig) -> None:
    """Check the format of a quantised checkpoint. The dtypes show which weights are quantised.

    Raises:
        ModelError: config.json has an impossible value, or the description cannot be read.
        UnsupportedModelError: the quantised format of the checkpoint is not supported.
    """
    if (found := config.part("quantization_config")) is not None:
        if found.raw.get("quant_method") == "mxfp4":
            raise UnsupportedModelError(
                f"quantization_config of {config.directory} has quant_method 'mxfp4', which is not "
                f"supported; {MXFP4_REMEDY}"
            )
        reason = _refusal(found)
        if reason:
            raise UnsupportedModelError(
                f"quantization_config of {config.directory} has {reason}; {SUPPORTED}"
            )
    description = config.directory / DESCRIPTION
    if description.exists():
        _check_description(description)


def _refusal(config: ModelConfig) -> str:
    """Return the first key that is not supported, with its value, or an empty string."""
    method = config.raw.get("quant_method")
    if method == "fp8":
        return _difference(config.raw, FP8)
    if method != "compressed-tensors":
        return f"quant_method {method!r:.80}"
    if (form := config.text("format", "int-quantized")) != "int-quantized":
        return f"format {form!r:.80}"
    if config.has("kv_cache_scheme"):
        return "a kv_cache_scheme"
    groups = config.part("config_groups") or config.empty_part()
    for name in groups.raw:
        group = groups.part(name) or config.empty_part()
        for part, wanted in (("weights", INT8_WEIGHTS), ("input_activations", INT8_INPUTS)):
            difference = _difference((group.part(part) or config.empty_part()).raw, wanted)
            if difference:
                return f"{difference} for {part} of {name}"
    return ""


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the first key whose value differs from the wanted value, with its value; "" without a
    difference.
    """
    for key, value in wanted.items():
        if found.get(key) != value:
            return f"{key} {found.get(key)!r:.80}"
    return ""


def _check_description(path: Path) -> None:
    for name, kind in read_json_object(path).items():
        if name.endswith(".weight") and kind not in DESCRIBED:
            raise UnsupportedModelError(f"{path} has {name} in {kind}; {SUPPORTED}")
