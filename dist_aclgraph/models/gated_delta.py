"""Linear attention of a decoder (Qwen3-Next, Qwen3.5): the products, gates and weights that
``layers/gated_delta.py`` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.delta_rule import rule_for
from dist_aclgraph.layers.gated_delta import GatedDelta, ShortConvolution
from dist_aclgraph.layers.linear import Product, RowParallelLinear
from dist_aclgraph.layers.state_metadata import StateCache
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import MatrixPart, WeightSlices, part_by_part
from dist_aclgraph.shapes.heads import linear_heads_per_rank
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ModelSpec


@dataclass(frozen=True)
class GatedDeltaAttention:
    """The linear attention of one layer on this rank.

    Attributes:
        qkvz: hidden -> inputs of the convolution, and gates z of the results.
        gates: hidden -> b and a, one number for each value head.
        decay: [num_value_heads] float32, ``-exp(A_log)``.
        dt_bias: [num_value_heads] float32.
        norm: [value_dim], weight of the norm of results.
    """

    qkvz: Product
    gates: Product
    decay: Tensor
    dt_bias: Tensor
    delta: GatedDelta
    norm: Tensor
    output_product: RowParallelLinear
    eps: float

    def project(self, h: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, g, beta, z [n, heads * value_dim], and a tensor for
        the results [n, heads, value_dim].
        """
        delta = self.delta
        width = delta.num_value_heads * delta.value_dim
        qkv, z = torch.split(self.qkvz(h), [delta.num_channels, width], dim=-1)
        b, a = self.gates(h).chunk(2, -1)
        g = softplus(a.float() + self.dt_bias) * self.decay
        out = h.new_empty(h.shape[0], delta.num_value_heads, delta.value_dim)
        return qkv, g, b.sigmoid(), z, out

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: StateCache,
        metadata: AttentionMetadata,
        earlier: None,
    ) -> None:
        qkv, g, beta, _, out = inputs
        if metadata.states is not None:
            self.delta(qkv, g, beta, out, cache, metadata.states)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        *_, z, out = inputs
        normed = torch.ops.npu.npu_rms_norm(out, self.norm, self.eps)[0].flatten(1)
        # silu(z) * normed, computed in float32
        return self.output_product(torch.ops.npu.npu_swiglu(torch.cat([z, normed], -1)))


@dataclass(frozen=True)
class _Heads:
    """The heads of one rank."""

    keys: range
    values: range

    @classmethod
    def of(cls, linear: LinearSpec, group: CommGroup) -> _Heads:
        """Split the heads over the tensor parallel group.

        Raises:
            ConfigError: the group size does not divide the heads.
        """
        counts = linear_heads_per_rank(linear.num_key_heads, linear.num_value_heads, group.size)
        return cls(*(range(group.rank * n, (group.rank + 1) * n) for n in counts))


class LinearAttention:
    """State that the layers share: the rank's heads and the rule."""

    def __init__(
        self, spec: ModelSpec, groups: RankGroups, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Split the heads.

        Raises:
            ConfigError: the heads cannot be split over the group.
        """
        assert spec.linear is not None
        self._linear, self._hidden, self._eps = spec.linear, spec.hidden_size, spec.rms_norm_eps
        self._heads = _Heads.of(spec.linear, groups.tp)
        self._device, self._dtype = device, dtype
        self._rule = rule_for(dtype)
        d = spec.linear.key_dim
        self._unit = torch.full((d,), d**-0.5, dtype=torch.float32, device=device)

    def load(self, slices: WeightSlices, index: int) -> GatedDeltaAttention:
        """Return this rank's linear attention of layer ``index``."""
        prefix = f"model.layers.{index}.linear_attn"
        linear, values, d = self._linear, self._heads.values, self._linear.value_dim
        read, shape = slices.checkpoint.read_float32, (linear.num_value_heads,)
        mine = slice(values.start, values.stop)
        grouped = linear.has_grouped_weights
        qkvz, gates = (self._grouped if grouped else self._separate)(slices, prefix)
        return GatedDeltaAttention(
            qkvz=slices.product(qkvz),
            # A separate product, because quantised checkpoints may keep its matrices in floats.
            gates=slices.product(gates),
            decay=slices.place(-read(f"{prefix}.A_log", shape)[mine].exp()),
            dt_bias=slices.place(read(f"{prefix}.dt_bias", shape)[mine]),
            delta=GatedDelta(
                len(self._heads.keys),
                len(values),
                d,
                ShortConvolution(self._convolution(slices, prefix)),
                self._unit,
                self._rule,
            ),
            norm=slices.whole(f"{prefix}.norm.weight", (d,)),
            output_product=slices.row_parallel(
                f"{prefix}.out_proj",
                (self._hidden, linear.num_value_heads * d),
                values.start * d,
                values.stop * d,
                has_bias=False,
            ),
            eps=self._eps,
        )

    def make_cache(self, room: CacheRoom) -> StateCache:
        # Padding reads slot 0, so a NaN there would stay.
        linear, heads, device = self._linear, self._heads, self._device
        channels = sum(stop - start for start, stop in self._channels())
        conv = (room.num_slots, linear.conv_width - 1, channels)
        recurrent = (room.num_slots, len(heads.values), linear.value_dim, linear.key_dim)
        return StateCache(
            torch.zeros(conv, dtype=self._dtype, device=device),
            torch.zeros(recurrent, dtype=self._rule.state_dtype, device=device),
        )

    def _channels(self) -> list[tuple[int, int]]:
        """Return [start, stop) of this rank's queries, keys and values among all channels."""
        linear, heads = self._linear, self._heads
        keys = linear.num_key_heads * linear.key_dim
        parts = [(0, heads.keys, linear.key_dim), (keys, heads.keys, linear.key_dim)]
        parts.append((2 * keys, heads.values, linear.value_dim))
        return [(first + own.start * d, first + own.stop * d) for first, own, d in parts]

    def _convolution(self, slices: WeightSlices, prefix: str) -> Tensor:
        """Return the weight of this rank's channels, [width, channels] float32."""
        shape = (self._linear.num_channels, 1, self._linear.conv_width)
        parts = [
            slices.part(f"{prefix}.conv1d.weight", shape, 0, *channels)
            for channels in self._channels()
        ]
        return slices.place(torch.cat(parts).squeeze(1).t().float())

    def _separate(
        self, slices: WeightSlices, prefix: str
    ) -> tuple[list[MatrixPart], list[MatrixPart]]:
        """Return the matrices of ``qkvz`` and ``gates`` that a checkpoint stores one by one."""
        linear, values, hidden = self._linear, self._heads.values, self._hidden
        d, channels = linear.value_dim, (linear.num_channels, hidden)
        qkv = [
            slices.matrix(f"{prefix}.in_proj_qkv", channels, 0, *each) for each in self._channels()
        ]
        z = slices.matrix(
            f"{prefix}.in_proj_z",
            (linear.num_value_heads * d, hidden),
            0,
            values.start * d,
            values.stop * d,
        )
        gates = [
            slices.matrix(
                f"{prefix}.in_proj_{name}",
                (linear.num_value_heads, hidden),
                0,
                values.start,
                values.stop,
            )
            for name in "ba"
        ]
        return [*qkv, z], gates

    def _grouped(
        self, slices: WeightSlices, prefix: str
    ) -> tuple[list[MatrixPart], list[MatrixPart]]:
        """Return the same matrices of a checkpoint that stores one key head after another."""
        linear = self._linear
        count = linear.num_value_heads // linear.num_key_heads
        keys, values = linear.key_dim, count * linear.value_dim
        return (
            [self._by_head(slices, f"{prefix}.in_proj_qkvz", [keys, keys, values, values])],
            [self._by_head(slices, f"{prefix}.in_proj_ba", [count, count])],
        )

    def _by_head(self, slices: WeightSlices, name: str, widths: Sequence[int]) -> MatrixPart:
        """Return this rank's part of a matrix that stores, for each key head, several parts.

        Args:
            widths: number of outputs of each part. The result has the first parts of all heads,
                then the second parts, and so on.
        """
        keys, width = self._heads.keys, sum(widths)
        shape = (self._linear.num_key_heads * width, self._hidden)
        matrix = slices.matrix(name, shape, 0, keys.start * width, keys.stop * width)
        return matrix.rearranged(part_by_part(widths))
