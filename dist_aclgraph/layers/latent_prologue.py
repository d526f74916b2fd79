"""One operator for the work before latent attention: ``npu_mla_prolog_v3``.

This operator is used in a step whose tokens all attend directly. The operator replaces several
operators: it computes queries, latents and rotated keys, writes the cache, and multiplies queries
by key matrices. Steps with this operator and steps with the separate operators can use the same
cache, because the order of the cache's elements is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, ops

from dist_aclgraph.layers.int8_products import Int8Linear
from dist_aclgraph.layers.int8_rows import Int8Rows
from dist_aclgraph.layers.latent_attention import NORM_EPS, LatentCache
from dist_aclgraph.layers.linear import Product

# Value of weight_quant_mode: the rows, and the weights of the three products, are in int8.
WEIGHTS_IN_INT8 = 2
# The only sizes that the operator accepts. SIZES: number of elements of a query's latent, of a
# key's latent, of the rotated part of a head, and of the remaining part of a head. HEADS: number of
# heads on a rank.
SIZES = (1536, 512, 64, 128)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class LatentPrologue:
    """Does the work before latent attention in one operator, in int8. The weights are in
    FRACTAL_NZ.

    Attributes:
        queries: the product that computes the queries' latents: hidden -> 1536.
        key_values: the product that computes the latent, and the part of the key that is rotated:
            hidden -> 512 + 64.
        up: the product that computes the queries from the queries' latents: 1536 -> heads * (128 +
            64).
        query_norm, latent_norm: [1536] and [512], weights of norms.
        keys: [heads, 128, 512], matrices. A head's matrix multiplied by a latent is the head's key.
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
        """Return an object that does the work of these products and norms in one operator.

        Args:
            down: the products ``queries`` and ``key_values``. All three products must be of the
                class ``Int8Linear``.
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
