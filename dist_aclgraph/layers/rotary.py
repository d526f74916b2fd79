"""Rotary position embedding: inverse frequencies and the tables that all layers share.

``rope_parameters`` of a Hugging Face checkpoint selects one of these schemes: default, linear,
dynamic NTK, Llama 3, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753). The tables are built
once, outside of captures. Each step gathers the rows of its tokens' positions from the tables.

In dynamic NTK and LongRoPE, the frequencies depend on the length of a request. A request grows, but
its keys in the cache cannot change. So all requests of a deployment use the frequencies of the
longest possible request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.planning.step_sizes import SPARE_POSITIONS
from dist_aclgraph.shapes.rope_spec import UNROTATED, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_len: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies, [head_dim / 2] float32, and the factor by which cos and sin
    are multiplied.

    Args:
        max_len: length of the longest possible request.
    """
    theta = _dynamic_theta(rope, head_dim, max_len) if rope.kind == "dynamic" else rope.theta
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / wavelengths
    if rope.kind == UNROTATED:
        return torch.zeros_like(frequencies), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_len else rope.short_factors
        return 1.0 / (torch.tensor(factors) * wavelengths), _longrope_attention_factor(rope)
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
    """Return cos and sin for every position. In each row, the first half and the second half are
    equal.

    Args:
        max_len: length of the longest possible request.

    Returns:
        [max_len + SPARE_POSITIONS, head_dim] each.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim, max_len)
    angles = (
        torch.arange(max_len + SPARE_POSITIONS, dtype=torch.float32)[:, None] * frequencies[None, :]
    )
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def pairs_across_head(
    heads: Tensor, head_dim: int, rotary_dim: int, *, interleaves: bool = False
) -> Tensor:
    """Change the order of each head's elements to the order that the tables of ``pad_tables`` need.

    The first ``rotary_dim`` elements of a head are rotated. In the result, the two elements of a
    rotated pair are ``head_dim / 2`` apart. Attention scores do not change, because the order is
    the same for queries and keys.

    Args:
        heads: [..., heads * head_dim]; the last axis belongs to the outputs of a product, or to the
            weights of a norm.
        interleaves: whether the two elements of a pair are neighbours in the checkpoint. If false,
            they are ``rotary_dim / 2`` apart.
    """
    rest = (head_dim - rotary_dim) // 2
    each = heads.reshape(*heads.shape[:-1], -1, head_dim)
    rotated, plain, more = torch.split(each, [rotary_dim, rest, rest], -1)
    if interleaves:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    return torch.cat([first, plain, second, more], -1).flatten(-2)


def pad_tables(cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Extend tables from [positions, rotary_dim] to [positions, head_dim]. The new elements are at
    the end of each half of a row. The new elements are 1 in cos, and 0 in sin. With cos 1 and sin
    0, the rotation leaves an element of a head unchanged.
    """
    count = (head_dim - cos.shape[-1]) // 2
    cos, sin = (table.reshape(*table.shape[:-1], 2, -1) for table in (cos, sin))
    return pad(cos, (0, count), value=1).flatten(-2), pad(sin, (0, count)).flatten(-2)


class RotaryTables:
    """Owns cos and sin on the device, for positions up to ``max_len`` and for spare positions."""

    def __init__(
        self,
        rope: RopeSpec,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the tables."""
        cos, sin = rope_tables(rope, head_dim, max_len, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def rows(self, positions: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of [n] int32 positions, viewed as ``shape``."""
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        return cos.view(shape), sin.view(shape)


class RotaryTableSet:
    """Owns the tables of a decoder that has several rotary embeddings, or that multiplies queries
    by a factor.

    A table is stored only once, even if several layers use it. Each layer stores the indices of the
    tables that it uses.
    """

    def __init__(
        self,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        rotary_dim: int | None = None,
    ) -> None:
        """Make an empty set.

        Args:
            rotary_dim: number of rotated elements of a head; None means all ``head_dim`` elements.
                The elements of heads must have the order of ``pairs_across_head``.
        """
        self._head_dim, self._rotary_dim = head_dim, rotary_dim or head_dim
        self._max_len, self._dtype, self._device = max_len, dtype, device
        self._cos: list[Tensor] = []
        self._sin: list[Tensor] = []

    def add(self, rope: RopeSpec) -> RopeRows | None:
        """Add the tables of an embedding, and return their indices. Return None if the embedding
        rotates no element of a head.
        """
        if not rope.num_tables:
            return None
        cos, sin = rope_tables(rope, self._rotary_dim, self._max_len, torch.float32)
        keys = self._place(cos, sin)
        if not rope.query_growth:
            return RopeRows(keys, keys)
        factors = query_factors(rope, len(cos))[:, None]
        return RopeRows(self._place(cos, sin, factors), keys)

    def _place(self, cos: Tensor, sin: Tensor, factors: Tensor | float = 1.0) -> int:
        cos, sin = pad_tables(cos, sin, self._head_dim)
        for tables, table in ((self._cos, cos), (self._sin, sin)):
            tables.append((table * factors).to(self._dtype).to(self._device))
        return len(self._cos) - 1

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of [n] int32 positions, [tables, n, 1, head_dim] each."""
        cos, sin = (
            torch.stack([table.index_select(0, positions) for table in tables]).unsqueeze(2)
            if len(tables) > 1
            else tables[0].index_select(0, positions)[None, :, None]
            for tables in (self._cos, self._sin)
        )
        return cos, sin


@dataclass(frozen=True)
class RopeRows:
    """The indices of two tables in the result of ``RotaryTableSet.rows``: of the table for queries,
    and of the table for keys.
    """

    queries: int
    keys: int

    def rotate(self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotate ``q`` and ``k``, [1, n, heads, head_dim] each.

        Args:
            rope: cos and sin, [tables, n, 1, head_dim] each.
        """
        rotate = torch.ops.npu.npu_rotary_mul
        of_q, of_k = ([table[i : i + 1] for table in rope] for i in (self.queries, self.keys))
        return rotate(q, *of_q), rotate(k, *of_k)


def query_factors(rope: RopeSpec, count: int) -> Tensor:
    """Return the factors by which queries at the positions 0 to ``count - 1`` are multiplied,
    [count] float32.
    """
    steps = torch.arange(count, dtype=torch.float32) // rope.original_len
    return 1 + rope.query_growth * torch.log1p(steps)


def score_factor(rope: RopeSpec) -> float:
    """Return the factor by which attention scores are multiplied, as ``mscale_all_dim`` defines it.

    Only DeepSeek's models multiply scores. Other models apply the whole factor of YaRN to cos and
    sin.
    """
    if rope.kind == "default" or not rope.mscale_all_dim:
        return 1.0
    return _mscale(rope.factor, rope.mscale_all_dim) ** 2


def _dynamic_theta(rope: RopeSpec, head_dim: int, max_len: int) -> float:
    ratio = max(max_len, rope.max_position_embeddings) / rope.max_position_embeddings
    stretch = rope.factor * ratio - (rope.factor - 1)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _longrope_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_len))


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # For long waves, ``smooth`` is 0, and frequencies are divided by the factor. For short waves,
    # ``smooth`` is 1, and frequencies do not change.
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: RopeSpec, head_dim: int, frequencies: Tensor) -> tuple[Tensor, float]:
    def dimension_of(rotations: float) -> float:
        return (head_dim * math.log(rope.original_len / (rotations * 2 * math.pi))) / (
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
