"""Writes checkpoints with weights of four bits, as published tools do, and the same weights in
bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT = ("embed_tokens", "lm_head", "norm", ".gate.", "kv_b_proj")
EXPERTS_ONLY = (*KEPT, "self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down")
Tensors = dict[str, Tensor]
Writer = Callable[[str, Tensor, Tensor], Tensors]  # arguments: module, values, scales


def quantise(weight: Tensor, group: int | None, most: int = 7) -> tuple[Tensor, Tensor]:
    """Return the weight's quantised values, and scales that bfloat16 can represent.

    Args:
        weight: [out, in].
        group: number of inputs that share a scale; None means all inputs.
        most: largest quantised value: 7 for four bits, 127 for int8.

    Returns:
        [out, in] int8 and [out, groups] float32.
    """
    grouped = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    scales = (grouped.abs().amax(2) / most).bfloat16().float()
    values = (grouped / scales[:, :, None]).round().clamp(-most - 1, most)
    return values.flatten(1).to(torch.int8), scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).flatten(1)


def packed_ints(module: str, values: Tensor, scales: Tensor) -> Tensors:
    """Return tensors in the form pack-quantized of compressed-tensors. Each int32 contains eight
    values; 8 is added to each value.
    """
    parts = (values.long() + 8).unflatten(1, (-1, 8))
    words = sum(parts[..., i] << (4 * i) for i in range(8))
    return {
        f"{module}.weight_packed": torch.where(words >= 2**31, words - 2**32, words).int(),
        f"{module}.weight_scale": scales.bfloat16(),
        f"{module}.weight_shape": torch.tensor(values.shape),
    }


def bytes_each(module: str, values: Tensor, scales: Tensor) -> Tensors:
    """Return tensors with one value per byte, as compressed-tensors (int-quantized) and old
    ModelSlim write them.
    """
    return {f"{module}.weight": values, f"{module}.weight_scale": scales}


def pairs_of_inputs(module: str, values: Tensor, scales: Tensor) -> Tensors:
    """Return tensors in ModelSlim's form for W4A16 with one scale for each output."""
    low, high = values[:, ::2].int(), values[:, 1::2].int()
    return _modelslim(module, low, high, scales)


def pairs_of_outputs(module: str, values: Tensor, scales: Tensor) -> Tensors:
    """Return tensors in ModelSlim's form for W4A16 with groups, or for W4A8 without groups."""
    low, high = values[::2].int(), values[1::2].int()
    return _modelslim(module, low, high, scales.reshape(-1, 1))


def pairs_with_two_scales(module: str, values: Tensor, scales: Tensor) -> Tensors:
    """Return tensors in ModelSlim's form for W4A8 with groups."""
    whole = scales.amax(1, keepdim=True)
    tensors = pairs_of_outputs(module, values, whole)
    second = scales / whole
    return tensors | {
        f"{module}.weight_scale_second": second,
        f"{module}.weight_offset_second": torch.zeros_like(second, dtype=torch.int64),
    }


def _modelslim(module: str, low: Tensor, high: Tensor, scales: Tensor) -> Tensors:
    both = (low & 15) | ((high & 15) << 4)
    return {
        f"{module}.weight": torch.where(both > 127, both - 256, both).to(torch.int8),
        f"{module}.weight_scale": scales,
        f"{module}.weight_offset": torch.zeros_like(scales),
    }


def compressed_config(
    group: int | None, form: str = "pack-quantized", *, int8_rows: bool = False
) -> dict[str, Any]:
    """Return a ``quantization_config`` in which only experts are quantised."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    targets = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": targets | {"input_activations": rows if int8_rows else None}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|down)_proj.*",
            r"re:.*mlp\.gate$",
        ],
    }


def rewrite(
    source: Path,
    target: Path,
    writer_of: Callable[[str], tuple[int | None, Writer] | None],
    *,
    config: Mapping[str, Any] | None = None,
    description: Mapping[str, Any] | None = None,
    kind: str = "",
    others: str = "FLOAT",
) -> tuple[Path, Path]:
    """Write a checkpoint twice: with weights of four bits, and with the same values in bfloat16.

    Args:
        writer_of: function that returns a module's group size and writer; if it returns None, the
            module stays in floats.
        config: additional keys of config.json.
        description: additional keys of ModelSlim's description file; None means that no such file
            is written.
        kind: ModelSlim's name for the type of the matrices of four bits.
        others: ModelSlim's name for the type of all other matrices. With ``W8A8_DYNAMIC``, they are
            written in int8.
    """
    quantised, floats = target / "quantised", target / "floats"
    stored: Tensors = {}
    plain: Tensors = {}
    kinds: dict[str, str] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        how = writer_of(module) if tensor.dim() == 2 else None
        is_int8 = not how and others != "FLOAT" and tensor.dim() == 2 and not kept(module)
        kinds[name] = kind if how else others if is_int8 else "FLOAT"
        if not how and not is_int8:
            stored[name] = plain[name] = tensor
            continue
        group, writer = how or (None, bytes_each)
        values, scales = quantise(tensor, group, most=127 if is_int8 else 7)
        stored |= writer(module, values, scales)
        plain[name] = dequantise(values, scales).bfloat16()
    text = json.loads((source / "config.json").read_text())
    for folder, tensors, keys in ((quantised, stored, config or {}), (floats, plain, {})):
        folder.mkdir()
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(text | dict(keys)))
    if description is not None:
        (quantised / "quant_model_description.json").write_text(
            json.dumps(kinds | dict(description))
        )
    return quantised, floats


def kept(module: str, names: tuple[str, ...] = KEPT) -> bool:
    """Return whether the tool keeps ``module`` in floats."""
    return any(name in f"{module}." for name in names)
