"""Which quantised checkpoints can be read: by config.json and its companion, not by weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ModelError, UnsupportedModelError

DESCRIPTION = "quant_model_description.json"  # of Ascend's tool: the type of every tensor
DESCRIBED = ("W8A8_DYNAMIC", "FLOAT")
FP8 = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_INPUTS = {**INT8_WEIGHTS, "strategy": "token", "dynamic": True}
SUPPORTED = (
    "supported: compressed-tensors with symmetric int8 weights by channel and dynamic int8 "
    "activations by token; fp8 in blocks of 128 x 128 with dynamic activations; "
    f"{' and '.join(DESCRIBED)} in {DESCRIPTION}"
)


def check_quantisation(directory: Path, config: Mapping[str, Any]) -> None:
    """Check how a checkpoint is quantised, if it is; its weights say for themselves which are.

    Args:
        config: what its config.json holds.

    Raises:
        ModelError: its description cannot be read.
        UnsupportedModelError: it is quantised in another way than the supported ones.
    """
    found = config.get("quantization_config")
    if found:
        reason = _refusal(found)
        if reason:
            raise UnsupportedModelError(
                f"quantization_config of {directory} has {reason}; {SUPPORTED}"
            )
    description = directory / DESCRIPTION
    if description.is_file():
        _check_description(description)


def _refusal(config: Mapping[str, Any]) -> str:
    """Return what is not supported, or nothing."""
    method = config.get("quant_method")
    if method == "fp8":
        return _difference(config, FP8)
    if method != "compressed-tensors":
        return f"quant_method {method!r}"
    if config.get("format", "int-quantized") != "int-quantized":
        return f"format {config['format']!r}"
    if config.get("kv_cache_scheme"):
        return "a kv_cache_scheme"
    for name, group in config.get("config_groups", {}).items():
        for part, wanted in (("weights", INT8_WEIGHTS), ("input_activations", INT8_INPUTS)):
            difference = _difference(group.get(part) or {}, wanted)
            if difference:
                return f"{difference} for {part} of {name}"
    return ""


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the first key that is not as wanted, with its value, or nothing."""
    for key, value in wanted.items():
        if found.get(key) != value:
            return f"{key} {found.get(key)!r}"
    return ""


def _check_description(path: Path) -> None:
    try:
        types = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as e:
        raise ModelError(f"{path} is not a description of tensors: {e}") from e
    for name, kind in types.items():
        if name.endswith(".weight") and kind not in DESCRIBED:
            raise UnsupportedModelError(f"{path} has {name} in {kind}; {SUPPORTED}")
