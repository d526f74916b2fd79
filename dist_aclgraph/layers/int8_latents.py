"""Latent attention over a cache that stores latents in int8.

The cache row of a token contains the values of its latent in int8, the bytes of its rotated key,
and one float32 scale for every 128 values of the latent. When the normalised latents are written,
``npu_dynamic_quant`` quantises them. ``npu_kv_quant_sparse_flash_attention`` reads the rows. This
operator returns no log-sum-exps, so a cache with int8 latents cannot be sharded.

For each query, the operator gets the indices of the keys to which the query attends. Without an
indexer, the operator instead gets the indices of all blocks of 16 keys that the query may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import SPARSE_MODE_CAUSAL, AttentionMetadata, DeviceRows
from dist_aclgraph.layers.latent_attention import (
    NORM_EPS,
    LatentAttention,
    compute_values,
    pad_heads,
)
from dist_aclgraph.shapes.int8_latents import ROPE_DIM, TILE

BY_TILE = 2  # quantisation mode of keys and values: one scale for each tile of 128 values
IN_ROWS = 1  # the scales are in the cache rows, after the keys
ABSORBED_MODE = 2  # the only value of attention_mode that the operator accepts
KEY_BLOCK = 16  # the largest block of keys that the operator accepts for one index


@dataclass(frozen=True)
class Int8LatentCache:
    """One layer's cache rows, [num_blocks, block_size, 1, row bytes] int8, and its index keys,
    [num_blocks, block_size, 1, 128]. A layer without an indexer has no index keys.
    """

    rows: Tensor
    index_keys: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,) if self.index_keys is None else (self.rows, self.index_keys)

    @property
    def states(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def block_size(self) -> int:
        return self.rows.shape[1]


def write_int8_latents(
    kv: Tensor, norm: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, slots: Tensor
) -> None:
    """Normalise, rotate and quantise the first rows of ``kv``, and write them to their slots.

    Args:
        kv: [>= n, 512 + 64], neither normalised nor rotated.
        norm: [512], weight of the norm.
        rope: cos and sin, [>= n, 1, 1, 64] each.
        cache: [num_blocks, block_size, 1, row bytes] int8.
        slots: [n, 1] int32; padding has a slot of the dummy block.
    """
    npu, n, rank = torch.ops.npu, len(slots), norm.shape[0]
    latents, keys = (x.contiguous() for x in torch.split(kv[:n], [rank, kv.shape[1] - rank], 1))
    latents = npu.npu_rms_norm(latents, norm, NORM_EPS)[0]
    cos, sin = (table[:n] for table in rope)
    keys = npu.npu_interleave_rope(keys.view(n, 1, 1, -1), cos, sin)
    values, scales = npu.npu_dynamic_quant(latents.view(-1, TILE))
    parts = [x.view(n, -1).view(torch.int8) for x in (values, keys, scales)]
    npu.npu_scatter_nd_update_(cache.flatten(0, 2), slots, torch.cat(parts, 1))


def attend_to_int8_latents(
    query: Tensor,
    cache: Tensor,
    chosen: Tensor,
    scale: float,
    block_table: Tensor,
    rows: DeviceRows,
    key_block: int = 1,
) -> Tensor:
    """Return the result of attention to latents, [n, heads, 512]: for each query, the weighted sum
    of latents.

    Args:
        query: [n, heads, 512 + 64]: queries multiplied by the key matrices, then rotated queries.
        chosen: [n, 1, top_k] int32, for each query, the indices of the blocks of keys to which the
            query attends; the remaining elements are -1.
        key_block: number of keys in each block of ``chosen``. If ``key_block`` is 1, ``chosen``
            contains positions of keys.
    """
    attended: Tensor = torch.ops.npu.npu_kv_quant_sparse_flash_attention(
        query,
        cache,
        cache,
        chosen,
        scale,
        BY_TILE,
        BY_TILE,
        block_table=block_table,
        actual_seq_lengths_query=rows.query_ends,
        actual_seq_lengths_kv=rows.kv_lens,
        sparse_block_size=key_block,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=SPARSE_MODE_CAUSAL,
        attention_mode=ABSORBED_MODE,
        quant_scale_repo_mode=IN_ROWS,
        tile_size=TILE,
    )
    return attended


def seen_blocks(num_seen: Tensor, num_keys: int) -> Tensor:
    """Return, for each query, the indices of the blocks of ``KEY_BLOCK`` keys that the query may
    see; the remaining elements are -1.

    Args:
        num_seen: [n] int32, number of keys that each query may see.
        num_keys: maximum number of keys in the blocks of one row of the block table.

    Returns:
        [n, 1, num_keys / KEY_BLOCK] int32.
    """
    count = -(-num_keys // KEY_BLOCK)
    index = torch.arange(count, dtype=torch.int32, device=num_seen.device)
    is_seen = index * KEY_BLOCK < num_seen.unsqueeze(1)
    return torch.where(is_seen, index, -1).unsqueeze(1)


def read_int8_latents(rows: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the contents of cache rows, [n, row bytes] int8: the latents, [n, rank], and the
    rotated keys, [n, 64].
    """
    key_bytes = ROPE_DIM * dtype.itemsize
    values, keys, scales = torch.split(
        rows, [rank, key_bytes, rows.shape[1] - rank - key_bytes], dim=1
    )
    factors = scales.contiguous().view(torch.float32)
    latents = values.float().view(len(rows), -1, TILE) * factors.unsqueeze(2)
    return latents.flatten(1).to(dtype), keys.contiguous().view(dtype)


@dataclass(frozen=True)
class Int8LatentAttention(LatentAttention):
    """Latent attention of this rank's heads to all keys that a query sees."""

    def write(
        self,
        kv: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Int8LatentCache,
        metadata: AttentionMetadata,
    ) -> None:
        assert metadata.on_device is not None
        write_int8_latents(kv, self.norm, rope, cache.rows, metadata.on_device.slots)

    def attend_directly(
        self,
        absorbed: Tensor,
        q_rope: Tensor,
        out: Tensor,
        cache: Int8LatentCache,
        metadata: AttentionMetadata,
        earlier: Tensor | None = None,
    ) -> Tensor:
        """Compute attention to the latents of the cache; see ``LatentAttention.attend_directly``.

        Args:
            earlier: the result of ``seen_blocks``, if an earlier layer has computed it.

        Returns:
            The result of ``seen_blocks``, for the next layers.
        """
        rows, table = metadata.on_device, metadata.block_table
        assert rows is not None and rows.num_seen is not None
        if earlier is None:
            earlier = seen_blocks(rows.num_seen, table.shape[1] * cache.block_size)
        query = torch.cat(pad_heads(absorbed, q_rope), -1)
        attended = attend_to_int8_latents(
            query, cache.rows, earlier, self.scale, table, rows, KEY_BLOCK
        )
        compute_values(attended.transpose(0, 1)[: self.num_heads], self.values, out)
        return earlier

    def stored(self, cache: Int8LatentCache) -> list[Tensor]:
        return [cache.rows.flatten(0, 2)]

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return read_int8_latents(rows[0], self.norm.shape[0], dtype)
