"""Sparse latent attention over a cache whose latents are int8.

A token's row contains the values of its latent in int8, the bytes of its rotated key, and a float32
scale for each 128 values. ``npu_dynamic_quant`` quantises the normalised latents when they are
written; ``npu_kv_quant_sparse_flash_attention`` reads the rows. This operator returns no
log-sum-exps, so ranks cannot share such a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import SPARSE_MODE_CAUSAL, DeviceRows
from dist_aclgraph.layers.latent_attention import NORM_EPS
from dist_aclgraph.shapes.int8_latents import TILE

BY_TILE = 2  # quantisation mode of keys and values: one scale for each tile
IN_ROWS = 1  # the scales are in the rows of the keys
ABSORBED_MODE = 2  # the only value of attention_mode that the operator accepts


@dataclass(frozen=True)
class Int8SparseCache:
    """One layer's rows, [num_blocks, block_size, 1, row bytes] int8, and index keys, [num_blocks,
    block_size, 1, 128]. A layer that uses the choice of an earlier layer has no index keys.
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
) -> Tensor:
    """Return the attended latents, [n, heads, 512].

    Args:
        query: [n, heads, 512 + 64], absorbed and rotated.
        chosen: [n, 1, top_k] int32, the positions of each query's keys, followed by -1.
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
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=SPARSE_MODE_CAUSAL,
        attention_mode=ABSORBED_MODE,
        quant_scale_repo_mode=IN_ROWS,
        tile_size=TILE,
    )
    return attended
