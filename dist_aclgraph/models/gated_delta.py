"""Linear attention of a decoder (Qwen3-Next, Qwen3.5): the products, gates and weights around the
computation of ``layers/gated_delta.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.int8_rows import Rows, quantised
from dist_aclgraph.layers.linear import Product
from dist_aclgraph.layers.local_experts import Activation
from dist_aclgraph.models.attention_kind import Rope
from dist_aclgraph.models.delta_attention import DeltaAttention, DeltaKind
from dist_aclgraph.models.loading import MatrixPart, WeightSlices, part_by_part


@dataclass(frozen=True)
class GatedDeltaAttention(DeltaAttention):
    """The linear attention of one layer on this rank.

    Attributes:
        qkvz: product that computes the inputs of the convolution, and z, the gates of the results.
        gates: product that computes b and a. beta is computed from b, and g is computed from a. b
            and a have one number for each value head.
        decay: [num_value_heads] float32, ``-exp(A_log)``.
        dt_bias: [num_value_heads] float32, added to a.
        activate: maps z and the normalised results, which are joined in one tensor, to the input of
            ``output_product``.
    """

    qkvz: Product
    gates: Product
    decay: Tensor
    dt_bias: Tensor
    activate: Activation

    @property
    def quantises_rows(self) -> bool:
        return self.qkvz.quantises_rows and self.gates.quantises_rows

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, g, beta, z [n, heads * value_dim], and a tensor for
        the results [n, heads, value_dim].
        """
        delta = self.delta
        if self.quantises_rows:
            h = quantised(h)  # quantised once, for both products
        width = delta.num_value_heads * delta.value_dim
        qkv, z = torch.split(self.qkvz(h), [delta.num_channels, width], dim=-1)
        b, a = self.gates(h).chunk(2, -1)
        g = softplus(a.float() + self.dt_bias) * self.decay
        return qkv, g, b.sigmoid(), z, self.room_for_results(qkv)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        *_, z, out = inputs
        # silu(z) * normed, computed in float32
        return self.output_product(self.activate(torch.cat([z, self.normed(out)], -1)))


class GatedDeltaKind(DeltaKind):
    """The data that all layers of linear attention share."""

    def load(self, slices: WeightSlices, index: int) -> GatedDeltaAttention:
        """Return this rank's linear attention of layer ``index``."""
        prefix = f"model.layers.{index}.linear_attn"
        linear, values = self._linear, self._heads.values
        read, shape = slices.checkpoint.read_float32, (linear.num_value_heads,)
        mine = slice(values.start, values.stop)
        grouped = linear.has_grouped_weights
        qkvz, gates = (self._grouped if grouped else self._separate)(slices, prefix)
        output = self._output(slices, f"{prefix}.out_proj")
        return GatedDeltaAttention(
            qkvz=slices.product(qkvz),
            # This product is separate from ``qkvz``, because quantised checkpoints can store its
            # matrices in floats.
            gates=slices.product(gates),
            decay=slices.place(-read(f"{prefix}.A_log", shape)[mine].exp()),
            dt_bias=slices.place(read(f"{prefix}.dt_bias", shape)[mine]),
            delta=self._delta(slices, self._convolution(slices, prefix)),
            norm=slices.whole(f"{prefix}.norm.weight", (linear.value_dim,)),
            output_product=output,
            activate=slices.activation(output.product),
            eps=self._eps,
        )

    def _channels(self) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of this rank's queries, keys and values among all
        channels.
        """
        linear, heads = self._linear, self._heads
        keys = linear.num_key_heads * linear.key_dim
        parts = [(0, heads.keys, linear.key_dim), (keys, heads.keys, linear.key_dim)]
        parts.append((2 * keys, heads.values, linear.value_dim))
        return [(first + own.start * d, first + own.stop * d) for first, own, d in parts]

    def _convolution(self, slices: WeightSlices, prefix: str) -> list[Tensor]:
        """Return the weights of this rank's channels, [channels, 1, width] each."""
        shape = (self._linear.num_channels, 1, self._linear.conv_width)
        return [
            slices.part(f"{prefix}.conv1d.weight", shape, 0, *channels)
            for channels in self._channels()
        ]

    def _separate(
        self, slices: WeightSlices, prefix: str
    ) -> tuple[list[MatrixPart], list[MatrixPart]]:
        """Return the matrices of ``qkvz`` and ``gates`` from a checkpoint that stores their parts
        as separate matrices.
        """
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
        """Return the matrices of ``qkvz`` and ``gates`` from a checkpoint that groups their parts
        by key head.
        """
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
            widths: number of outputs of each part. The result contains the first parts of all
                heads, then the second parts of all heads, and so on.
        """
        keys, width = self._heads.keys, sum(widths)
        shape = (self._linear.num_key_heads * width, self._hidden)
        matrix = slices.matrix(name, shape, 0, keys.start * width, keys.stop * width)
        return matrix.rearranged(part_by_part(widths))
