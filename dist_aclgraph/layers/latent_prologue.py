"""One operator for the work before latent attention: ``npu_mla_prolog_v3``.

This operator is used in a step whose tokens all attend directly. It replaces the operators that
compute queries, latents and rotated keys, that write the cache, and that multiply queries by key
matrices. Steps with and without this operator use the same cache, because the order of elements in
the cache is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, ops

from dist_aclgraph.layers.int8_products import Int8Linear
from dist_aclgraph.layers.int8_rows import Int8Rows
from dist_aclgraph.layers.latent_attention import NORM_EPS, LatentCache
from dist_aclgraph.layers.linear import Product

WEIGHTS_IN_INT8 = 2  # weight_quant_mode: the rows, and the weights of three products, are in int8
# The only sizes that the operator accepts: elements of the latents of queries and of keys, of a
# head's rotated part and of its other part; and numbers of heads of a rank.
SIZES = (1536, 512, 64, 128)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class LatentPrologue:
    """The work before latent attention, in int8; weights are in FRACTAL_NZ.

    Attributes:
        queries: product that computes the latents of queries: hidden -> 1536.
        key_values: product that computes the latent and the key to rotate: hidden -> 512 + 64.
        up: product that computes queries from their latents: 1536 -> heads * (128 + 64).
        query_norm, latent_norm: [1536] and [512], weights of norms.
        keys: [heads, 128, 512], matrices that compute each head's key from a latent.
    """

    queries: Int8Linear
    key_values: Int8Linear
    up: Int8Linear
    query_norm: Tensor
    latent_norm: Tensor
    keys: Tensor

    @classmethod
    def of(
        cls,
        down: Sequence[Product],
        up: Product,
        query_norm: Tensor,
        latent_norm: Tensor,
        keys: Tensor,
    ) -> LatentPrologue:
        """Return the operator that does the work of separate products and norms.

        Args:
            down: ``queries`` and ``key_values``; all products must be ``Int8Linear``.
        """
        queries, key_values = down
        assert isinstance(queries, Int8Linear) and isinstance(key_values, Int8Linear)
        assert isinstance(up, Int8Linear)
        return cls(queries, key_values, up, query_norm, latent_norm, keys)

    def __call__(
        self, rows: Int8Rows, rope: tuple[Tensor, Tensor], cache: LatentCache, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the latents and the rotated keys of the first rows to their slots.

        Args:
            rows: [>= n, hidden].
            rope: cos and sin, [>= n, 1, 1, 64] each.
            slots: [n] int64; a row with slot -1 is not written.

        Returns:
            Queries multiplied by ``keys``, [n, heads, 512], and rotated queries, [n, heads, 64].
        """
        n = len(slots)
        cos, sin = (table[:n].view(n, -1) for table in rope)
        query, query_rope, *_ = ops.npu.npu_mla_prolog_v3(
            rows.values[:n],
            self.queries.weight,
            self.up.weight,
            self.keys,
            self.key_values.weight,
            self.query_norm,
            self.latent_norm,
            sin,
            cos,
            cache.latents,
            cache.rope_keys,
            cache_index=slots,
            dequant_scale_x=rows.scales[:n].view(n, 1),
            dequant_scale_w_dq=self.queries.scale.view(1, -1),
            dequant_scale_w_uq_qr=self.up.scale.view(1, -1),
            dequant_scale_w_dkv_kr=self.key_values.scale.view(1, -1),
            rmsnorm_epsilon_cq=NORM_EPS,
            rmsnorm_epsilon_ckv=NORM_EPS,
            weight_quant_mode=WEIGHTS_IN_INT8,
        )
        return query, query_rope
