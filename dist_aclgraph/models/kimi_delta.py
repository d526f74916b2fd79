"""Kimi Delta Attention (arXiv 2510.26692). Each channel of a key has its own decay, and the results
are multiplied by sigmoids of gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.int8_rows import Rows, quantised
from dist_aclgraph.layers.linear import Product
from dist_aclgraph.models.attention_kind import Rope
from dist_aclgraph.models.delta_attention import DeltaAttention, DeltaKind
from dist_aclgraph.models.loading import MatrixPart, WeightSlices


@dataclass(frozen=True)
class KimiDeltaAttention(DeltaAttention):
    """The linear attention of one layer on this rank.

    Attributes:
        qkv: product that computes the inputs of the convolution.
        inner: product that computes the inputs of ``decays``, the inputs of ``gates``, and b, which
            has one number for each head.
        decays: product that computes one number for each channel of each head's key; the decays are
            computed from these numbers.
        gates: product that computes a gate for each element of each head's result.
        decay: [heads, 1] float32, ``-exp(A_log)``.
        dt_bias: [heads * key_dim] float32, added to the results of ``decays``.
    """

    qkv: Product
    inner: Product
    decays: Product
    gates: Product
    decay: Tensor
    dt_bias: Tensor

    @property
    def quantises_rows(self) -> bool:
        return self.qkv.quantises_rows and self.inner.quantises_rows

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, g, beta, the gates [n, heads * value_dim], and a
        tensor for the results [n, heads, value_dim].
        """
        delta = self.delta
        if self.quantises_rows:
            h = quantised(h)  # quantised once, for both products
        widths = [delta.key_dim, delta.value_dim, delta.num_value_heads]
        decays, gates, b = (x.contiguous() for x in torch.split(self.inner(h), widths, dim=-1))
        steps = softplus(self.decays(decays).float() + self.dt_bias)
        g = steps.view(len(steps), delta.num_value_heads, delta.key_dim) * self.decay
        # beta stays in float32, because separate operators compute the rule in float32
        beta = b.float().sigmoid()
        qkv = self.qkv(h)
        return qkv, g, beta, self.gates(gates), self.room_for_results(qkv)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        *_, gates, out = inputs
        return self.output_product(self.normed(out) * gates.sigmoid())


class KimiDelta(DeltaKind):
    """The data that all layers of Kimi Delta Attention share."""

    def load(self, slices: WeightSlices, index: int) -> KimiDeltaAttention:
        """Return this rank's linear attention of layer ``index``."""
        prefix, hidden = f"model.layers.{index}.self_attn", self._hidden
        linear, heads = self._linear, self._heads.values
        d, count, read = linear.key_dim, linear.num_value_heads, slices.checkpoint.read_float32
        start, stop = heads.start * d, heads.stop * d

        def of_heads(name: str, width: int) -> MatrixPart:
            return slices.matrix(f"{prefix}.{name}", (count * d, width), 0, start, stop)

        inner = [slices.matrix(f"{prefix}.{x}_a_proj", (d, hidden), 0, 0, d) for x in "fg"]
        inner.append(slices.matrix(f"{prefix}.b_proj", (count, hidden), 0, heads.start, heads.stop))
        a_log = read(f"{prefix}.A_log", (1, 1, count, 1)).view(count, 1)
        dt_bias = read(f"{prefix}.dt_bias", (count * d,))
        convolution = [
            slices.part(
                f"{prefix}.{x}_conv1d.weight", (count * d, 1, linear.conv_width), 0, start, stop
            )
            for x in "qkv"
        ]
        return KimiDeltaAttention(
            qkv=slices.product([of_heads(f"{x}_proj", hidden) for x in "qkv"]),
            inner=slices.product(inner),
            decays=slices.product([of_heads("f_b_proj", d)]),
            gates=slices.product([of_heads("g_b_proj", d)]),
            decay=slices.place(-a_log[heads.start : heads.stop].exp()),
            dt_bias=slices.place(dt_bias[start:stop]),
            delta=self._delta(slices, convolution),
            norm=slices.whole(f"{prefix}.o_norm.weight", (d,)),
            output_product=self._output(slices, f"{prefix}.o_proj"),
            eps=self._eps,
        )
