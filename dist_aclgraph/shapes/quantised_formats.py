"""The supported formats of quantised checkpoints, as config.json and its companion file describe
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import UnsupportedModelError
from dist_aclgraph.shapes.int4_formats import (
    DESCRIPTION,
    INT8_GROUP,
    SMALLEST_GROUP,
    W4A8,
    W4A16,
    group_of,
)
from dist_aclgraph.shapes.json_files import read_json_object
from dist_aclgraph.shapes.model_config import ModelConfig

DESCRIBED = ("W8A8_DYNAMIC", W4A8, W4A16, "FLOAT")
FP8 = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INTEGERS = {"type": "int", "symmetric": True}
INT8_WEIGHTS = {"num_bits": 8, **INTEGERS, "strategy": "channel"}
INT8_INPUTS = {**INT8_WEIGHTS, "strategy": "token", "dynamic": True}
# Formats of compressed-tensors. PACKED: eight values of four bits in an int32. BYTES: one value in
# each byte.
PACKED, BYTES = "pack-quantized", "int-quantized"
IN_ORDER = (None, "static", "weight")  # values of actorder that do not change the order of inputs
MXFP4_ARCHITECTURES = ("GptOssForCausalLM",)
SUPPORTED = (
    "supported: compressed-tensors with symmetric int8 weights by channel and dynamic int8 "
    "activations by token, or with symmetric int4 weights by channel or group, in groups of a "
    f"multiple of {SMALLEST_GROUP} or, with dynamic int8 activations by token, of {INT8_GROUP}; "
    "fp8 in blocks of 128 x 128 with dynamic activations; mxfp4 of gpt-oss; "
    f"{', '.join(DESCRIBED[:-1])} and {DESCRIBED[-1]} in {DESCRIPTION}, with the same groups"
)


def check_quantisation(config: ModelConfig) -> None:
    """Check the format of a quantised checkpoint. This function does not find out which weights are
    quantised. Loaders find this out from the dtypes of the tensors.

    Raises:
        ModelError: config.json has an impossible value, or the description cannot be read.
        UnsupportedModelError: the quantised format of the checkpoint is not supported.
    """
    if (found := config.part("quantization_config")) is not None:
        if found.raw.get("quant_method") == "mxfp4" and config.architecture in MXFP4_ARCHITECTURES:
            return
        reason = _refusal(found)
        if reason:
            raise UnsupportedModelError(
                f"quantization_config of {config.directory} has {reason}; {SUPPORTED}"
            )
    description = config.directory / DESCRIPTION
    if description.exists():
        _check_description(description)


def _refusal(config: ModelConfig) -> str:
    """Return the first unsupported key with its value; "" if all keys are supported."""
    method = config.raw.get("quant_method")
    if method == "fp8":
        return _difference(config.raw, FP8)
    if method != "compressed-tensors":
        return f"quant_method {method!r:.80}"
    if config.has("kv_cache_scheme"):
        return "a kv_cache_scheme"
    transforms = config.part("transform_config") or config.empty_part()
    if (moves := transforms.part("config_groups")) is not None:
        # Such transforms can change activations while the model runs.
        return f"a transform_config with {next(iter(moves.raw))!r:.80}"
    usual = config.text("format", BYTES)
    groups = config.part("config_groups") or config.empty_part()
    for name in groups.raw:
        group = groups.part(name) or config.empty_part()
        weights, inputs = (
            (group.part(key) or config.empty_part()).raw for key in ("weights", "input_activations")
        )
        if reason := _group_refusal(weights, inputs, group.text("format", usual)):
            return f"{reason} of {name}"
    return ""


def _group_refusal(weights: Mapping[str, Any], inputs: Mapping[str, Any], form: str) -> str:
    """Return the first unsupported key of a group of compressed-tensors; "" if there is none."""
    if form not in (PACKED, BYTES):
        return f"format {form!r:.80}"
    is_int4 = weights.get("num_bits") == 4
    if reason := _difference(weights, INTEGERS if is_int4 else INT8_WEIGHTS):
        return f"{reason} for weights"
    if form == PACKED and not is_int4:
        return f"format {form!r:.80} for weights"
    if (inputs or not is_int4) and (reason := _difference(inputs, INT8_INPUTS)):
        return f"{reason} for input_activations"
    if is_int4 and weights.get("actorder") not in IN_ORDER:
        return f"actorder {weights['actorder']!r:.80} for weights"
    return _strategy_refusal(weights, has_int8_rows=bool(inputs)) if is_int4 else ""


def _strategy_refusal(weights: Mapping[str, Any], *, has_int8_rows: bool) -> str:
    strategy, group = weights.get("strategy"), group_of(weights)
    if strategy not in ("channel", "group") or (strategy == "group") != (group is not None):
        return f"strategy {strategy!r:.80} with group_size {weights.get('group_size')!r:.80}"
    return "" if _takes(group, has_int8_rows=has_int8_rows) else f"group_size {group} for weights"


def _takes(group: int | None, *, has_int8_rows: bool) -> bool:
    """Return whether the operators accept groups of this size; None means no groups."""
    if group is None:
        return True
    return group == INT8_GROUP if has_int8_rows else group % SMALLEST_GROUP == 0


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the first key with an unwanted value, together with this value; "" if all keys have
    the wanted values.
    """
    for key, value in wanted.items():
        if found.get(key) != value:
            return f"{key} {found.get(key)!r:.80}"
    return ""


def _check_description(path: Path) -> None:
    description = read_json_object(path)
    group = group_of(description)
    for name, kind in description.items():
        if not name.endswith(".weight"):
            continue
        if kind not in DESCRIBED:
            raise UnsupportedModelError(f"{path} has {name} in {kind}; {SUPPORTED}")
        if kind in (W4A8, W4A16) and not _takes(group, has_int8_rows=kind == W4A8):
            raise UnsupportedModelError(
                f"{path} has {name} in {kind} with group_size {group}; {SUPPORTED}"
            )
