"""Multi-head latent attention over a paged cache of latents: absorbed for few queries of a request,
plain for many.

Operators: ``npu_kv_rmsnorm_rope_cache`` (norms and rotates a step's rows on their way to the
cache), ``npu_transpose_batchmatmul`` (a product for each head) and
``npu_fused_infer_attention_score_v2`` with the rotated parts of queries and keys beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import (
    SPARSE_MODE_CAUSAL,
    SPARSE_MODE_NONE,
    AttentionMetadata,
    AttentionOperator,
    LatentStep,
    launch,
)
from dist_aclgraph.layers.latent_forms import Chunk

LATENT_ATTENTION = AttentionOperator(
    "npu_fused_infer_attention_score_v2", "actual_seq_qlen", "actual_seq_kvlen"
)
NORM_EPS = 1e-6  # of the norms inside attention, whatever the other norms have


@dataclass(frozen=True)
class LatentCache:
    """One layer's latents [num_blocks, block_size, 1, 512], normed, and rotated keys [..., 64]."""

    latents: Tensor
    rope_keys: Tensor

    @property
    def block_size(self) -> int:
        return self.latents.shape[1]


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention of this rank's heads.

    Attributes:
        norm: [512], of the latent.
        keys, values: [heads, 128, 512], what makes each head's key and value of a latent.
        scale: of scores.
    """

    norm: Tensor
    keys: Tensor
    values: Tensor
    scale: float

    @property
    def num_heads(self) -> int:
        return self.keys.shape[0]

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        kv: Tensor,
        out: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: LatentCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Write latents and rotated keys, then attend; rows beyond the slot mapping are left alone.

        Args:
            q, out: [num_tokens, heads, 128].
            q_rope: [num_tokens, heads, 64], rotated.
            kv: [num_tokens, 512 + 64], neither normed nor rotated.
            rope: cos and sin [num_tokens, 1, 1, 64].
            metadata: with ``latent``, and slots in int64.
        """
        step, num_live = metadata.latent, metadata.slot_mapping.shape[0]
        assert step is not None
        if num_live == 0:
            return
        self._write(kv[:num_live], rope, cache, metadata.slot_mapping)
        if n := step.num_absorbed_tokens:
            self._attend_absorbed(q[:n], q_rope[:n], out[:n], cache, step, metadata)
        if step.kv_slots is not None:
            assert metadata.tasks is None, "graphs hold the absorbed form only"
            plain = _PlainStep(self, cache, step.kv_slots, metadata.causal_mask)
            for part in step.plain:
                rows = slice(part.start, part.stop)
                plain.attend(part.chunks, q[rows], q_rope[rows], out[rows])

    def _write(
        self, kv: Tensor, rope: tuple[Tensor, Tensor], cache: LatentCache, slots: Tensor
    ) -> None:
        n = len(kv)
        # Each token a sequence of its own, as the field does. The operator wants a block for each
        # sequence; where there are fewer, all tokens are one, which its document allows, too.
        rows = (n, 1, 1) if n <= len(cache.latents) else (1, 1, n)
        cos, sin = (table[:n].view(*rows, -1) for table in rope)
        torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv.view(*rows, -1),
            self.norm,
            cos,
            sin,
            slots,
            cache.rope_keys,
            cache.latents,
            epsilon=NORM_EPS,
            cache_mode="PA",
        )

    def _attend_absorbed(
        self,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        cache: LatentCache,
        step: LatentStep,
        metadata: AttentionMetadata,
    ) -> None:
        absorbed = torch.ops.npu.npu_transpose_batchmatmul(  # [n, heads, 512]
            q, self.keys, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
        attended = absorbed.new_empty((self.num_heads, len(q), self.keys.shape[2]))
        latents = cache.latents.flatten(2)  # [num_blocks, block_size, 512]
        arguments: dict[str, Any] = {
            "query": absorbed,
            "key": latents,
            "value": latents,
            "query_rope": q_rope,
            "key_rope": cache.rope_keys.flatten(2),
            "atten_mask": metadata.causal_mask,
            "block_table": step.block_table,
            "num_query_heads": self.num_heads,
            "num_key_value_heads": 1,
            "softmax_scale": self.scale,
            "input_layout": "TND_NTD",
            "block_size": cache.block_size,
            "sparse_mode": (
                SPARSE_MODE_NONE if metadata.causal_mask is None else SPARSE_MODE_CAUSAL
            ),
        }
        lens = step.query_ends, step.kv_lens
        launch(LATENT_ATTENTION, arguments, *lens, attended, metadata.tasks)
        out.copy_(torch.bmm(attended, self.values.transpose(1, 2)).transpose(0, 1))


@dataclass(frozen=True)
class _PlainStep:
    """Attention over keys and values that are made for it, in an eager step.

    Attributes:
        kv_slots: of the KV tokens that chunks count.
    """

    attention: LatentAttention
    cache: LatentCache
    kv_slots: Tensor
    causal_mask: Tensor | None

    def attend(self, chunks: Sequence[Chunk], q: Tensor, q_rope: Tensor, out: Tensor) -> None:
        """Attend over all chunks, one by one."""
        if len(chunks) == 1:
            no_sums = torch.empty(1, dtype=torch.float32, device=out.device)
            self._attend_chunk(chunks[0], q, q_rope, out, no_sums, needs_sums=False)
            return
        # The softmax of all is that of each, weighted by the sums of their exponentials.
        outs = out.new_empty((len(chunks), *out.shape))
        sums = out.new_empty((len(chunks), *out.shape[:-1], 1), dtype=torch.float32)
        for each in zip(chunks, outs, sums, strict=True):
            chunk, chunk_out, chunk_sums = each
            self._attend_chunk(chunk, q, q_rope, chunk_out, chunk_sums, needs_sums=True)
        out.copy_((outs.float() * sums.softmax(0)).sum(0))

    def _attend_chunk(
        self,
        chunk: Chunk,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        sums: Tensor,
        *,
        needs_sums: bool,
    ) -> None:
        """Fill ``out``, and ``sums`` [n, heads, 1] with the logs of the summed exponentials."""
        heads, slots = self.attention.num_heads, self.kv_slots[chunk.start : chunk.stop]
        latents, rope_keys = (
            cache.view(-1, cache.shape[-1]).index_select(0, slots)
            for cache in (self.cache.latents, self.cache.rope_keys)
        )
        # One product for all heads: their weights lie one after the other.
        key, value = (
            torch.mm(latents, weight.flatten(0, 1).t()).view(len(slots), heads, -1)
            for weight in (self.attention.keys, self.attention.values)
        )
        LATENT_ATTENTION.overload(
            query=q,
            key=key,
            value=value,
            query_rope=q_rope,
            key_rope=rope_keys.unsqueeze(1).expand(-1, heads, -1).contiguous(),
            atten_mask=self.causal_mask if chunk.is_causal else None,
            actual_seq_qlen=chunk.query_ends,
            actual_seq_kvlen=chunk.kv_ends,
            num_query_heads=heads,
            num_key_value_heads=heads,
            softmax_scale=self.attention.scale,
            input_layout="TND",
            sparse_mode=SPARSE_MODE_CAUSAL if chunk.is_causal else SPARSE_MODE_NONE,
            return_softmax_lse=needs_sums,
            out=[out, sums],
        )
