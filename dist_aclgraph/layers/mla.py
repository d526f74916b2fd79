"""Multi-head latent attention over a paged cache of latents: absorbed for few queries of a request,
plain for many.

Operators: ``npu_kv_rmsnorm_rope_cache`` (norms and rotates a step's rows on their way to the
cache), ``npu_transpose_batchmatmul`` (a product for each head) and
``npu_fused_infer_attention_score_v2`` with the rotated parts of queries and keys beside the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import (
    SPARSE_MODE_CAUSAL,
    SPARSE_MODE_NONE,
    AttentionMetadata,
    AttentionOperator,
    launch,
)
from dist_aclgraph.layers.latent_forms import Chunk, PlainPart

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
        absorbed_keys: [heads, 128, 512], from a query head to the latent.
        absorbed_values: [heads, 512, 128], from attended latents to a value head.
        plain_keys, plain_values: [512, heads * 128], the same weights as the plain form wants them.
        scale: of scores.
    """

    norm: Tensor
    absorbed_keys: Tensor
    absorbed_values: Tensor
    plain_keys: Tensor
    plain_values: Tensor
    scale: float

    @property
    def num_heads(self) -> int:
        return self.absorbed_keys.shape[0]

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
            self._attend_absorbed(q[:n], q_rope[:n], out[:n], cache, metadata)
        for part in step.plain:
            self._attend_plain(part, q, q_rope, out, cache, metadata)

    def _write(
        self, kv: Tensor, rope: tuple[Tensor, Tensor], cache: LatentCache, slots: Tensor
    ) -> None:
        n = len(kv)
        cos, sin = (table[:n].view(1, 1, n, -1) for table in rope)
        torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv.view(1, 1, n, -1),
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
        metadata: AttentionMetadata,
    ) -> None:
        step = metadata.latent
        assert step is not None
        product, n = torch.ops.npu.npu_transpose_batchmatmul, len(q)
        heads, rank = self.num_heads, self.absorbed_keys.shape[2]
        keep, swap = [0, 1, 2], [1, 0, 2]
        attended = torch.empty((heads, n, rank), dtype=q.dtype, device=q.device)
        latents = cache.latents.flatten(2)  # [num_blocks, block_size, 512]
        arguments: dict[str, Any] = {
            "query": product(q, self.absorbed_keys, perm_x1=swap, perm_x2=keep, perm_y=swap),
            "key": latents,
            "value": latents,
            "query_rope": q_rope,
            "key_rope": cache.rope_keys.flatten(2),
            "atten_mask": metadata.causal_mask,
            "block_table": step.block_table,
            "num_query_heads": heads,
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
        # Back to [tokens, heads, 128].
        out.copy_(product(attended, self.absorbed_values, perm_x1=keep, perm_x2=keep, perm_y=swap))

    def _attend_plain(
        self,
        part: PlainPart,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        cache: LatentCache,
        metadata: AttentionMetadata,
    ) -> None:
        assert metadata.tasks is None, "a graph's attention is absorbed"
        rows = slice(part.start, part.stop)
        q, q_rope, out = q[rows], q_rope[rows], out[rows]
        if len(part.chunks) == 1:
            self._attend_chunk(part.chunks[0], q, q_rope, out, None, cache, metadata)
            return
        # The softmax of all chunks is that of each, weighted by the sums of their exponentials.
        outs = q.new_empty((len(part.chunks), *out.shape))
        sums = q.new_empty((*outs.shape[:-1], 1), dtype=torch.float32)
        for chunk, chunk_out, log_sum in zip(part.chunks, outs, sums, strict=True):
            self._attend_chunk(chunk, q, q_rope, chunk_out, log_sum, cache, metadata)
        out.copy_((outs.float() * sums.softmax(0)).sum(0))

    def _attend_chunk(
        self,
        chunk: Chunk,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        log_sum: Tensor | None,
        cache: LatentCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Make keys and values of a chunk and attend to them.

        Args:
            log_sum: [num_tokens, heads, 1] float32, filled with the log of the summed exponentials
                of scores, or None where nobody needs it.
        """
        step = metadata.latent
        assert step is not None
        assert step.kv_slots is not None
        heads, slots = self.num_heads, step.kv_slots[chunk.start : chunk.stop]
        latents = cache.latents.view(-1, cache.latents.shape[-1]).index_select(0, slots)
        rope_keys = cache.rope_keys.view(-1, 1, cache.rope_keys.shape[-1]).index_select(0, slots)
        if log_sum is None:
            needs_sum, log_sum = False, torch.empty(1, dtype=torch.float32, device=out.device)
        else:
            needs_sum = True
        LATENT_ATTENTION.overload(
            query=q,
            key=torch.mm(latents, self.plain_keys).view(len(slots), heads, -1),
            value=torch.mm(latents, self.plain_values).view(len(slots), heads, -1),
            query_rope=q_rope,
            key_rope=rope_keys.expand(-1, heads, -1).contiguous(),
            atten_mask=metadata.causal_mask if chunk.is_causal else None,
            actual_seq_qlen=chunk.query_ends,
            actual_seq_kvlen=chunk.kv_ends,
            num_query_heads=heads,
            num_key_value_heads=heads,
            softmax_scale=self.scale,
            input_layout="TND",
            sparse_mode=SPARSE_MODE_CAUSAL if chunk.is_causal else SPARSE_MODE_NONE,
            return_softmax_lse=needs_sum,
            out=[out, log_sum],
        )
