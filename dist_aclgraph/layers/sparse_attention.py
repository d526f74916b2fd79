"""Sparse latent attention over a paged cache: each query attends to the latents that an indexer
chooses. Both prompts and decoding use latents as keys and values.

Operators: ``npu_lightning_indexer`` chooses keys by the index keys of all tokens; the cache also
contains the index keys. ``npu_sparse_flash_attention`` attends to the chosen latents. All lengths
are tensors on the device, so a captured graph needs no update of these operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import AttentionMetadata, DeviceRows
from dist_aclgraph.layers.latent_attention import (
    LatentCache,
    absorb,
    compute_values,
    write_latents,
)

SPARSE_MODE_CAUSAL = 3
ABSORBED_MODE = 2  # attention_mode of npu_sparse_flash_attention; other modes do not exist


@dataclass(frozen=True)
class SparseCache(LatentCache):
    """One layer's latents, rotated keys, and index keys, [num_blocks, block_size, 1, 128].

    A layer that uses the keys chosen by an earlier layer has no index keys.
    """

    index_keys: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        index_keys = () if self.index_keys is None else (self.index_keys,)
        return (*super().tensors, *index_keys)


@dataclass(frozen=True)
class IndexRows:
    """The projections that the indexer computes from the tokens of a step.

    Attributes:
        queries: [n, index heads, 128]; keys: [n, 128]; both are rotated.
        weights: [n, index heads], weights of the heads' scores.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


@dataclass(frozen=True)
class SparseLatentAttention:
    """Latent attention of this rank's heads to chosen keys.

    Attributes:
        norm: [512], weight of the latent's norm.
        keys: [heads, plain dim, 512]; values: [heads, value dim, 512].
        scale: factor of the attention scores.
        top_k: number of keys that a query attends to, if it sees more keys.
    """

    norm: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    top_k: int

    @property
    def num_heads(self) -> int:
        return self.keys.shape[0]

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        kv: Tensor,
        out: Tensor,
        index: IndexRows | None,
        rope: tuple[Tensor, Tensor],
        cache: SparseCache,
        metadata: AttentionMetadata,
        chosen: Tensor | None,
    ) -> Tensor | None:
        """Write latents, rotated keys and index keys to the cache, then attend.

        Args:
            q: [num_tokens, heads, plain dim]; out: [num_tokens, heads, value dim], whose rows after
                the live tokens stay unchanged.
            q_rope: [num_tokens, heads, 64], rotated.
            kv: [num_tokens, 512 + 64], neither normalised nor rotated.
            index: None if this layer has no indexer. Such a layer uses ``chosen``, the keys that
                the last earlier layer with an indexer has chosen.
            rope: cos and sin, [num_tokens, 1, 1, 64] each.
            metadata: its slots are int64, and it has the rows on the device.

        Returns:
            [num_direct, 1, top_k] int32, the positions of each query's chosen keys, followed by -1.
            None if the rank has no tokens.
        """
        if metadata.is_idle:
            return None
        n, rows = metadata.num_direct, metadata.on_device
        assert rows is not None and n == metadata.num_tokens
        write_latents(kv, self.norm, rope, cache, metadata.written)
        if index is not None:
            chosen = self._choose(index, cache, metadata, rows)
        assert chosen is not None, "the first layer must have an indexer"
        attended = torch.ops.npu.npu_sparse_flash_attention(
            absorb(q[:n], self.keys),
            cache.latents,
            cache.latents,
            chosen,
            self.scale,
            block_table=metadata.block_table,
            actual_seq_lengths_query=rows.query_ends,
            actual_seq_lengths_kv=rows.kv_lens,
            query_rope=q_rope[:n],
            key_rope=cache.rope_keys,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=SPARSE_MODE_CAUSAL,
            attention_mode=ABSORBED_MODE,
        )[0]
        compute_values(attended.transpose(0, 1), self.values, out[:n])
        return chosen

    def _choose(
        self, index: IndexRows, cache: SparseCache, metadata: AttentionMetadata, rows: DeviceRows
    ) -> Tensor:
        """Write index keys to the cache; return the chosen keys of each query."""
        assert cache.index_keys is not None
        n = metadata.num_direct
        torch.ops.npu.npu_scatter_nd_update_(
            cache.index_keys.flatten(0, 2), rows.slots, index.keys[: len(rows.slots)]
        )
        chosen: Tensor = torch.ops.npu.npu_lightning_indexer(
            index.queries[:n],
            cache.index_keys,
            index.weights[:n],
            actual_seq_lengths_query=rows.query_ends,
            actual_seq_lengths_key=rows.kv_lens,
            block_table=metadata.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self.top_k,
            sparse_mode=SPARSE_MODE_CAUSAL,
        )[0]
        return chosen
