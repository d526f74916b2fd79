"""Sparse latent attention of a decoder (DeepSeek V3.2, GLM-5): latent attention to the keys that an
indexer chooses for each query.

This module contains the products, norms and weights around the computation of
``layers/sparse_attention.py``. The indexer has only a few small heads. Every rank computes all of
these heads, so that all ranks choose the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.int8_latents import Int8LatentCache
from dist_aclgraph.layers.int8_rows import Rows, in_floats
from dist_aclgraph.layers.latent_attention import NORM_EPS
from dist_aclgraph.layers.linear import Linear, Product, RowParallelLinear
from dist_aclgraph.layers.sparse_attention import (
    Choice,
    IndexRows,
    SparseCache,
    SparseLatentAttention,
)
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import MatrixPart, WeightSlices
from dist_aclgraph.models.mla import LatentKind
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.model_spec import LatentSpec


@dataclass(frozen=True)
class Indexer:
    """The indexer of one layer.

    Attributes:
        key_norm, key_bias: [128], weight and bias of the layer norm of index keys.
        head_weights: product that computes the weight of each head's score: hidden -> index heads.
    """

    key_norm: Tensor
    key_bias: Tensor
    head_weights: Linear
    rope_dim: int

    def project(self, h: Tensor, queries: Tensor, keys: Tensor, rope: Rope) -> IndexRows:
        """Return the inputs of the operator that chooses keys.

        The scores are not scaled, because a positive factor does not change which keys are chosen.

        Args:
            queries: [n, index heads * 128]; keys: [n, 128]; neither normalised nor rotated.
        """
        width = self.key_norm.shape[0]
        keys = layer_norm(keys, (width,), self.key_norm, self.key_bias, NORM_EPS)
        return IndexRows(
            self._rotate(queries.view(len(h), -1, width), rope),
            self._rotate(keys.view(len(h), 1, width), rope).squeeze(1),
            self.head_weights(h),
        )

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotate the first elements of each head: [n, heads, 128] -> [n, heads, 128]."""
        first, rest = torch.split(x, [self.rope_dim, x.shape[2] - self.rope_dim], dim=-1)
        cos, sin = (table.view(1, -1, 1, self.rope_dim) for table in rope)
        turned = torch.ops.npu.npu_rotary_mul(first.unsqueeze(0), cos, sin)[0]
        return torch.cat([turned, rest], -1)


@dataclass(frozen=True)
class MultiHeadSparseAttention:
    """The attention of one layer on this rank.

    Attributes:
        down: product that computes, from the hidden states, the latents of queries [q_rank], the
            latent [512], the part of the key that is rotated [64], and the index key [128].
        q_norm: [q_rank], weight of the norm of the queries' latents.
        q_up: product that computes, from the queries' latents, the queries [heads * (plain dim +
            64)] and the index queries [index heads * 128].
        indexer: chooses the keys. None if the layer uses the keys chosen by an earlier layer. In
            such a layer, ``down`` computes no index keys, and ``q_up`` computes no index queries.
    """

    down: Product
    q_norm: Tensor
    q_up: Product
    indexer: Indexer | None
    sparse: SparseLatentAttention
    output_product: RowParallelLinear
    sizes: LatentSpec

    @property
    def quantises_rows(self) -> bool:
        # If the layer has an indexer, the rows must be floats, because the indexer's
        # ``head_weights`` also reads the rows.
        return self.indexer is None and self.down.quantises_rows

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Return q [n, heads, plain dim], the rotated part of q [n, heads, 64], kv [n, 576], the
        rows of the indexer if there is one, and an empty tensor for the result.
        """
        npu, sizes, heads = torch.ops.npu, self.sizes, self.sparse.num_heads
        q_rank, kv_width = self.q_norm.shape[0], sizes.kv_rank + sizes.rope_dim
        x = self.down(h)
        n = x.shape[0]
        latent, kv, index_keys = torch.split(
            x, [q_rank, kv_width, x.shape[1] - q_rank - kv_width], dim=-1
        )
        x = self.q_up(npu.npu_rms_norm(latent, self.q_norm, NORM_EPS)[0])
        width = heads * (sizes.plain_dim + sizes.rope_dim)
        q, index_queries = torch.split(x, [width, x.shape[1] - width], dim=-1)
        q, q_rope = torch.split(q.view(n, heads, -1), [sizes.plain_dim, sizes.rope_dim], dim=-1)
        q_rope = npu.npu_interleave_rope(q_rope.unsqueeze(2).contiguous(), *rope).squeeze(2)
        index: tuple[Tensor, ...] = ()
        if self.indexer is not None:
            rows = self.indexer.project(in_floats(h), index_queries, index_keys, rope)
            index = rows.queries, rows.keys, rows.weights
        out = torch.empty((n, heads, sizes.value_dim), dtype=x.dtype, device=x.device)
        return q.contiguous(), q_rope, kv.contiguous(), *index, out

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: SparseCache | Int8LatentCache,
        metadata: AttentionMetadata,
        earlier: Choice | None,
    ) -> Choice | None:
        """Compute attention into ``inputs[-1]``. Return the keys chosen for each query."""
        q, q_rope, kv, *index, out = inputs
        rows = IndexRows(*index) if self.indexer is not None else None
        return self.sparse(q, q_rope, kv, out, rows, rope, cache, metadata, earlier)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.output_product(inputs[-1].flatten(1))


class SparseLatent(LatentKind):
    """The data that all layers of sparse latent attention share: the rank's heads and the rotary
    tables.
    """

    takes_long_queries = True
    reads_device_rows = True
    chooses_keys = True

    @property
    def _indexer(self) -> IndexerSpec:
        assert self._spec.indexer is not None
        return self._spec.indexer

    def load(self, slices: WeightSlices, index: int) -> MultiHeadSparseAttention:
        return self.load_layer(slices, index, has_indexer=True)

    def load_layer(
        self, slices: WeightSlices, index: int, *, has_indexer: bool
    ) -> MultiHeadSparseAttention:
        """Return this rank's attention of layer ``index``. It has an indexer if ``has_indexer`` is
        true.
        """
        prefix, hidden = f"model.layers.{index}.self_attn", self._spec.hidden_size
        rank, spec = self._sizes.q_rank, self._indexer
        assert rank is not None
        down = [
            slices.matrix(f"{prefix}.q_a_proj", (rank, hidden), 0, 0, rank),
            self._key_values(slices, prefix),
        ]
        q_up = [self._queries(slices, f"{prefix}.q_b_proj", rank)]
        indexer = None
        if has_indexer:
            down.append(self._index_matrix(slices, f"{prefix}.indexer.wk", 1, hidden))
            q_up.append(self._index_matrix(slices, f"{prefix}.indexer.wq_b", spec.num_heads, rank))
            indexer = self._load_indexer(slices, f"{prefix}.indexer")
        norm, keys, values = self._up(slices, prefix)
        return MultiHeadSparseAttention(
            down=slices.product(down),
            q_norm=slices.whole(f"{prefix}.q_a_layernorm.weight", (rank,)),
            q_up=slices.product(q_up),
            indexer=indexer,
            sparse=SparseLatentAttention(
                norm, keys, values, self._scale, spec.top_k, self._context
            ),
            output_product=self._output(slices, prefix),
            sizes=self._sizes,
        )

    def _load_indexer(self, slices: WeightSlices, prefix: str) -> Indexer:
        spec = self._indexer
        norm, bias = (
            slices.checkpoint.read(f"{prefix}.k_norm.{name}", (spec.head_dim,))
            for name in ("weight", "bias")
        )
        weights = slices.columns(
            f"{prefix}.weights_proj.weight",
            spec.num_heads,
            self._spec.hidden_size,
            0,
            spec.num_heads,
        )
        return Indexer(
            slices.place(self._half_split(norm.unsqueeze(0)).squeeze(0)),
            slices.place(self._half_split(bias.unsqueeze(0)).squeeze(0)),
            Linear(slices.place(weights)),
            self._sizes.rope_dim,
        )

    def _index_matrix(
        self, slices: WeightSlices, name: str, num_heads: int, width: int
    ) -> MatrixPart:
        """Return a matrix of the indexer for all of the indexer's heads, [width, heads * 128]."""
        out = num_heads * self._indexer.head_dim
        return slices.matrix(name, (out, width), 0, 0, out).rearranged(self._half_split)

    def _half_split(self, columns: Tensor) -> Tensor:
        """Reorder the rotated part of each head. The part consists of pairs of neighbours. In the
        result, the first elements of all pairs are followed by the second elements.

        Products of index queries and index keys do not depend on the order of elements. With this
        order, the same operator can rotate the heads of all checkpoints.

        Args:
            columns: [n, index heads * 128]; the first elements of each head are its rotated part.
        """
        if not self._indexer.interleaves:
            return columns
        heads = columns.reshape(len(columns), -1, self._indexer.head_dim)
        dim = self._sizes.rope_dim
        first, rest = heads[..., :dim], heads[..., dim:]
        return torch.cat([first[..., ::2], first[..., 1::2], rest], -1).flatten(1)

    def make_cache(
        self, room: CacheRoom, *, has_indexer: bool = True
    ) -> SparseCache | Int8LatentCache:
        """Return one layer's cache, with index keys if the layer has an indexer."""
        sizes = self._sizes
        # every rank keeps the index keys of all shards
        whole = replace(room, block_size=room.block_size * self._context.dcp.size)
        index_keys = self._zeros(whole, self._indexer.head_dim) if has_indexer else None
        if room.int8_latents:
            return Int8LatentCache(self._int8_rows(room), index_keys)
        return SparseCache(
            self._zeros(room, sizes.kv_rank), self._zeros(room, sizes.rope_dim), index_keys
        )


@dataclass(frozen=True)
class ChosenLatent:
    """The kind of the layers that use the keys chosen by an earlier layer. These layers share the
    objects that ``sparse`` owns.

    Attributes:
        sparse: the kind of the layers with an indexer.
    """

    sparse: SparseLatent

    def load(self, slices: WeightSlices, index: int) -> MultiHeadSparseAttention:
        return self.sparse.load_layer(slices, index, has_indexer=False)

    def make_cache(self, room: CacheRoom) -> SparseCache | Int8LatentCache:
        return self.sparse.make_cache(room, has_indexer=False)
