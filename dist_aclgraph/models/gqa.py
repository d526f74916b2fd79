"""Grouped-query attention of a decoder. Fields of ``ModelSpec`` select the details of Llama, Qwen2,
Qwen3 and Qwen3-MoE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata, KVCache, PagedAttention
from dist_aclgraph.layers.context_parallel import ContextParallel
from dist_aclgraph.layers.linear import Product, RowParallelLinear
from dist_aclgraph.layers.rotary import RotaryTables
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.heads import heads_per_rank, kv_heads_per_rank
from dist_aclgraph.shapes.model_spec import ModelSpec


@dataclass(frozen=True)
class HeadShare:
    """The heads of a rank. If there are fewer KV heads than ranks, several ranks share the same KV
    head.
    """

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def share_heads(spec: ModelSpec, group: CommGroup) -> HeadShare:
    """Split the heads over the tensor parallel group.

    Raises:
        ConfigError: the group size does not divide the heads, or does not fit the KV heads.
    """
    size = group.size
    num_heads = heads_per_rank(spec.num_heads, size, is_latent=False)
    num_kv_heads = kv_heads_per_rank(spec.num_kv_heads, size)
    first_kv_head = group.rank * spec.num_kv_heads // size
    return HeadShare(num_heads, num_kv_heads, group.rank * num_heads, first_kv_head)


@dataclass(frozen=True)
class GroupedQueryAttention:
    """The attention of one layer on this rank."""

    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    paged: PagedAttention
    output_product: RowParallelLinear
    eps: float

    def project(self, h: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """Return q, k and v, [num_tokens, heads, head_dim] each, and a tensor for the result.

        q and k are rotated.
        """
        npu, a = torch.ops.npu, self.paged
        n = h.shape[0]
        widths = [a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim]
        q, k, v = torch.split(self.qkv(h), [widths[0], widths[1], widths[1]], dim=-1)
        q = q.reshape(1, n, a.num_heads, a.head_dim)
        k = k.reshape(1, n, a.num_kv_heads, a.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = npu.npu_rms_norm(q, self.q_norm, self.eps)[0]
            k = npu.npu_rms_norm(k, self.k_norm, self.eps)[0]
        q = npu.npu_rotary_mul(q, *rope)[0]
        k = npu.npu_rotary_mul(k, *rope)[0]
        # The cache write accepts only contiguous rows.
        v = v.reshape(n, a.num_kv_heads, a.head_dim).contiguous()
        return q, k, v, torch.empty_like(q)

    def attend(
        self, inputs: tuple[Tensor, ...], rope: Rope, cache: KVCache, metadata: AttentionMetadata
    ) -> None:
        q, k, v, out = inputs
        self.paged(q, k, v, out, cache, metadata)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.output_product(inputs[-1].flatten(1))


class GroupedQuery:
    """State that the layers share: the rank's heads and the rotary tables."""

    slot_dtype = torch.int32
    takes_long_queries = True
    ropes_written = False

    def __init__(
        self,
        spec: ModelSpec,
        groups: RankGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        """Build the rotary tables for requests of up to ``max_len`` tokens.

        Raises:
            ConfigError: the heads cannot be split over the group.
        """
        self._spec = spec
        self._heads = share_heads(spec, groups.tp)
        self._window = spec.window_within(max_len)
        self._context = ContextParallel.of(groups)
        self._device = device
        self._rotary = RotaryTables(spec.rope, spec.head_dim, max_len, dtype, device)

    def load(self, slices: WeightSlices, index: int) -> GroupedQueryAttention:
        prefix, window = f"model.layers.{index}.self_attn", self._window
        spec, heads, d = self._spec, self._heads, self._spec.head_dim
        q = (spec.num_heads * d, heads.first_head * d, (heads.first_head + heads.num_heads) * d)
        last_kv_head = heads.first_kv_head + heads.num_kv_heads
        kv = (spec.num_kv_heads * d, heads.first_kv_head * d, last_kv_head * d)
        parts = [(f"{prefix}.q_proj", *q), (f"{prefix}.k_proj", *kv), (f"{prefix}.v_proj", *kv)]
        has_norms, norm = spec.has_qk_norm, (d,)
        return GroupedQueryAttention(
            qkv=slices.fused(parts, spec.hidden_size, spec.has_qkv_bias),
            q_norm=slices.whole(f"{prefix}.q_norm.weight", norm) if has_norms else None,
            k_norm=slices.whole(f"{prefix}.k_norm.weight", norm) if has_norms else None,
            paged=PagedAttention(
                heads.num_heads,
                heads.num_kv_heads,
                d,
                self._context,
                window.num_keys if window and index in window.layers else None,
            ),
            output_product=slices.row_parallel(
                f"{prefix}.o_proj", (spec.hidden_size, q[0]), *q[1:], spec.has_output_bias
            ),
            eps=spec.rms_norm_eps,
        )

    def rope(self, positions: Tensor) -> Rope:
        """[n] -> cos and sin, [1, n, 1, head_dim] each."""
        return self._rotary.rows(positions, (1, -1, 1, self._spec.head_dim))

    def make_cache(self, room: CacheRoom) -> KVCache:
        shape = (room.num_blocks, room.block_size, self._heads.num_kv_heads, self._spec.head_dim)
        # Attention reads whole blocks, so a NaN after the last key would spread.
        return KVCache(
            *(torch.zeros(shape, dtype=room.dtype, device=self._device) for _ in range(2))
        )
