"""Multi-head latent attention over a paged cache of latents. Requests with few queries attend
directly to latents. For requests with many queries, keys and values are computed from the latents.

Operators: ``npu_kv_rmsnorm_rope_cache`` normalises and rotates a step's rows and writes them to the
cache; ``npu_transpose_batchmatmul`` computes one product for each head;
``npu_fused_infer_attention_score_v2`` computes attention, and has separate arguments for the
rotated parts of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.layers.attention import (
    FUSED_ATTENTION,
    FUSED_ATTENTION_V2,
    Arguments,
    AttentionMetadata,
    launch,
    run_now,
)
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.prompt_attention import DeviceLaunch, attend_parts
from dist_aclgraph.shapes.heads import padded_latent_heads

# epsilon of the norms inside attention, which may differ from the epsilon of other norms
NORM_EPS = 1e-6


@dataclass(frozen=True)
class LatentCache:
    """One layer's normalised latents, [num_blocks, block_size, 1, 512], and rotated keys,
    [num_blocks, block_size, 1, 64].
    """

    latents: Tensor
    rope_keys: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.latents, self.rope_keys

    @property
    def states(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def block_size(self) -> int:
        return self.latents.shape[1]


@dataclass(frozen=True)
class LatentAttention:
    """Latent attention of this rank's heads.

    Attributes:
        norm: [512], weight of the latent's norm.
        keys, values: [heads, 128, 512], matrices. A head's matrices multiplied by a latent are the
            head's key and value.
        scale: factor by which attention scores are multiplied.
        has_whole_heads: whether a key that is computed from a latent is concatenated with the
            rotated key; see ``attend_whole_heads``.
    """

    norm: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    context: ContextParallel = UNDIVIDED
    has_whole_heads: bool = False

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
        cache: Any,
        metadata: AttentionMetadata,
        earlier: Tensor | None = None,
    ) -> Tensor | None:
        """Write latents and rotated keys to the cache, then compute attention into ``out``.

        For tokens that attend directly, queries are first multiplied by the key matrices, so that
        the latents can be used as keys. For the other tokens (``parts``), keys and values are
        computed from the latents. Rows of ``out`` after the live tokens stay unchanged.

        Args:
            q, out: [num_tokens, heads, 128].
            q_rope: [num_tokens, heads, 64], rotated.
            kv: [num_tokens, 512 + 64], neither normalised nor rotated.
            rope: cos and sin, [num_tokens, 1, 1, 64] each.
            metadata: the metadata of the step, with int64 slots.
            earlier: the result of this method in the previous layer; None in the first layer.

        Returns:
            The result of ``attend_directly``, for the next layer.
        """
        if metadata.is_idle:
            return None
        if n := metadata.num_exchanged:
            assert metadata.written_rope is not None
            kv, rope = self.context.gather_new(kv, n), metadata.written_rope
        self.write(kv, rope, cache, metadata)
        found = None
        if n := metadata.num_direct:
            absorbed = absorb(q[:n], self.keys)
            found = self.attend_directly(absorbed, q_rope[:n], out[:n], cache, metadata, earlier)
        if metadata.parts:
            assert metadata.tasks is None, "graphs hold the direct form only"
            self._attend_parts(q, q_rope, out, cache, metadata)
        return found

    def write(
        self, kv: Tensor, rope: tuple[Tensor, Tensor], cache: Any, metadata: AttentionMetadata
    ) -> None:
        """Write the step's latents and rotated keys to the cache."""
        write_latents(kv, self.norm, rope, cache, metadata.written)

    def stored(self, cache: Any) -> list[Tensor]:
        """Return the tensors of the cache as rows: [num_slots, width] each."""
        return [x.view(-1, x.shape[-1]) for x in (cache.latents, cache.rope_keys)]

    def read(self, rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the latents, [n, 512], and the rotated keys, [n, 64], of some tokens.

        Args:
            rows: for each tensor of ``stored``, the rows of these tokens.
        """
        latents, rope_keys = rows
        return latents, rope_keys

    def attend_directly(
        self,
        absorbed: Tensor,
        q_rope: Tensor,
        out: Tensor,
        cache: Any,
        metadata: AttentionMetadata,
        earlier: Tensor | None = None,
    ) -> Tensor | None:
        """Compute attention to the latents of the cache, for the tokens that attend directly.

        Args:
            absorbed: [num_direct, heads, 512], queries multiplied by the key matrices.
            q_rope: [num_direct, heads, 64], rotated.
            out: [num_direct, heads, 128].
            earlier: the result of this method in the previous layer; None in the first layer.

        Returns:
            Data that later layers can use again, such as chosen keys; None if there are no such
            data.
        """
        context, is_empty = self.context, metadata.is_empty
        absorbed, q_rope = pad_heads(absorbed, q_rope)
        sums = None
        if is_empty is not None:
            absorbed, q_rope = gather_queries(context, absorbed, q_rope)
            sums = out.new_empty((*absorbed.shape[:2], 1), dtype=torch.float32)
        n, heads, rank = absorbed.shape
        attended = absorbed.new_empty((heads, n, rank))
        latents = cache.latents.flatten(2)  # [num_blocks, block_size, 512]
        arguments: Arguments = {
            "query": absorbed,
            "key": latents,
            "value": latents,
            "query_rope": q_rope,
            "key_rope": cache.rope_keys.flatten(2),
            "block_table": metadata.block_table,
            "num_query_heads": heads,
            "num_key_value_heads": 1,
            "softmax_scale": self.scale,
            "input_layout": "TND_NTD",
            "block_size": cache.block_size,
            **metadata.mask_arguments(is_causal=metadata.is_causal),
        }
        launch(FUSED_ATTENTION_V2, arguments, metadata, attended, sums)
        if is_empty is not None and sums is not None:
            merged = context.merge(attended.transpose(0, 1), sums, is_empty)
            attended = merged.to(out.dtype).transpose(0, 1)
        compute_values(attended[: self.num_heads], self.values, out)
        return None

    def _attend_parts(
        self,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        cache: Any,
        metadata: AttentionMetadata,
    ) -> None:
        heads = self.num_heads

        def attend(
            each: DeviceLaunch, rows: Sequence[Tensor], found: Tensor, sums: Tensor | None
        ) -> None:
            run = each.launch
            latents, rope_keys = self.read(rows, q.dtype)
            # One product computes all heads, because the heads' matrices are contiguous.
            key, value = (
                torch.mm(latents, weight.flatten(0, 1).t()).view(len(latents), heads, -1)
                for weight in (self.keys, self.values)
            )
            if self.has_whole_heads:
                rotated = rope_keys.unsqueeze(1).expand(-1, heads, -1)
                rows_of_q = slice(run.start, run.stop)
                query = torch.cat([q[rows_of_q], q_rope[rows_of_q]], -1)
                key = torch.cat([key, rotated], -1)
                mask = metadata.mask_arguments(is_causal=run.is_causal)
                attend_whole_heads(each, query, key, value, self.scale, mask, found, sums)
                return
            arguments: Arguments = {
                "query": q[run.start : run.stop],
                "key": key,
                "value": value,
                "query_rope": q_rope[run.start : run.stop],
                "key_rope": rope_keys.unsqueeze(1).expand(-1, heads, -1).contiguous(),
                FUSED_ATTENTION_V2.query_ends: run.query_ends,
                FUSED_ATTENTION_V2.kv_lens: run.kv_ends,
                "num_query_heads": heads,
                "num_key_value_heads": heads,
                "softmax_scale": self.scale,
                "input_layout": "TND",
                **metadata.mask_arguments(is_causal=run.is_causal),
            }
            run_now(FUSED_ATTENTION_V2, arguments, found, sums)

        attend_parts(metadata.parts, self.stored(cache), self.context, attend, out)


def attend_whole_heads(
    each: DeviceLaunch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Arguments,
    found: Tensor,
    sums: Tensor | None,
) -> None:
    """Compute attention for whole heads: each head's rotated part is included.

    The operator accepts such wide heads only if several query heads share a key head. For this
    reason, a query head of zeros is inserted after each query head. The two query heads share one
    key head. The results of the inserted heads are not used.

    Args:
        query: [n, heads, d]; key, value: [num_keys, heads, d]. Rotated parts are included.
        mask: the operator's arguments that say which keys are hidden from which queries.
        found: [n, heads, d], receives the result.
        sums: [n, heads, 1] float32, receives the log-sum-exps; None if they are not needed.
    """
    n, heads, d = query.shape
    arguments: Arguments = {
        "query": pad(query.unsqueeze(2), (0, 0, 0, 1)).view(n, 2 * heads, d),
        "key": key,
        "value": value,
        FUSED_ATTENTION.query_ends: each.launch.query_ends,
        FUSED_ATTENTION.kv_lens: each.launch.kv_ends,
        "num_heads": 2 * heads,
        "num_key_value_heads": heads,
        "scale": scale,
        "input_layout": "TND",
        **mask,
    }
    out = query.new_empty((n, 2 * heads, d))
    logs = None if sums is None else sums.new_empty((n, 2 * heads, 1))
    run_now(FUSED_ATTENTION, arguments, out, logs)
    found.copy_(out[:, ::2])
    if sums is not None and logs is not None:
        sums.copy_(logs[:, ::2])


def write_latents(
    kv: Tensor, norm: Tensor, rope: tuple[Tensor, Tensor], cache: LatentCache, slots: Tensor
) -> None:
    """Normalise and rotate the first rows of ``kv``, and write them to their slots.

    Args:
        kv: [>= n, 512 + 64], neither normalised nor rotated.
        norm: [512], weight of the norm.
        rope: cos and sin, [>= n, 1, 1, 64] each.
        slots: [n] int64; a row with slot -1 is not written.
    """
    n = len(slots)
    # The operator requires at least as many cache blocks as sequences. If there are enough blocks,
    # each token is passed as a separate sequence, as in vllm-ascend. Otherwise all tokens are
    # passed as one sequence, which the operator's documentation also allows.
    rows = (n, 1, 1) if n <= len(cache.latents) else (1, 1, n)
    cos, sin = (table[:n].view(*rows, -1) for table in rope)
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        kv[:n].view(*rows, -1),
        norm,
        cos,
        sin,
        slots,
        cache.rope_keys,
        cache.latents,
        epsilon=NORM_EPS,
        cache_mode="PA",
    )


def pad_heads(absorbed: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return both parts of the queries, [n, heads, ...]. The operators of latent attention accept
    only powers of two as the number of heads. If the number is not a power of two, heads of zeros
    are added at the end. The results of these heads are not used.
    """
    heads = absorbed.shape[1]
    if added := padded_latent_heads(heads) - heads:
        return pad(absorbed, (0, 0, 0, added)), pad(q_rope, (0, 0, 0, added))
    return absorbed, q_rope


def gather_queries(
    context: ContextParallel, absorbed: Tensor, q_rope: Tensor
) -> tuple[Tensor, Tensor]:
    """Gather the queries of all heads, from the ranks that share a cache. Return both parts of
    these queries.

    Args:
        absorbed: [n, heads, 512]; q_rope: [n, heads, 64]; both contain the queries of this rank's
            heads.
    """
    widths = [absorbed.shape[2], q_rope.shape[2]]
    both = context.gather_heads(torch.cat([absorbed, q_rope], -1))
    absorbed, q_rope = (x.contiguous() for x in torch.split(both, widths, -1))
    return absorbed, q_rope


def absorb(q: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries [n, heads, d] by key matrices [heads, d, 512]; return [n, heads, 512].

    Let r be the result for a query q, and let k be the key that is computed from a latent c. Then
    ``r@c`` equals ``q@k``.
    """
    absorbed: Tensor = torch.ops.npu.npu_transpose_batchmatmul(
        q, keys, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return absorbed


def compute_values(attended: Tensor, values: Tensor, out: Tensor) -> None:
    """Multiply the results of attention to latents, [heads, n, 512], by the value matrices, [heads,
    d, 512].

    Args:
        out: [n, heads, d], receives the result.
    """
    out.copy_(torch.bmm(attended, values.transpose(1, 2)).transpose(0, 1))
