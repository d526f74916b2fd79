"""Rotary position embedding: inverse frequencies and the tables that all layers share.

Formulas: the default, linear, Llama 3 and YaRN (arXiv 2309.00071) schemes as Hugging Face
checkpoints define them by ``rope_parameters``. The tables are built once, outside graph capture; a
step gathers its rows by the persistent position buffer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dist_aclgraph.shapes.model_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Return [head_dim / 2] float32 inverse frequencies and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, frequencies)
    return frequencies, 1.0


def rope_tables(
    rope: RopeSpec, head_dim: int, max_len: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position, [max_len, head_dim] each, both halves equal."""
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class RotaryTables:
    """cos and sin of every position below ``max_len`` on the device, [max_len, head_dim] each."""

    def __init__(
        self,
        rope: RopeSpec,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        cos, sin = rope_tables(rope, head_dim, max_len, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def rows(self, positions: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of [n] int32 positions, viewed in ``shape``."""
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        return cos.view(shape), sin.view(shape)


def score_factor(rope: RopeSpec) -> float:
    """Return the factor of attention scores that belongs to a scaled embedding's
    ``mscale_all_dim``.

    DeepSeek's rule; other models apply all of YaRN's factor to cos and sin.
    """
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _mscale(rope.factor, rope.mscale_all_dim) ** 2


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)  # 0: long waves, slowed down; 1: short waves, unchanged
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: RopeSpec, head_dim: int, frequencies: Tensor) -> tuple[Tensor, float]:
    original = rope.original_max_position_embeddings or rope.max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    interpolated = frequencies / rope.factor * ramp + frequencies * (1 - ramp)
    return interpolated, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
