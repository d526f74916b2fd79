"""Sparse latent attention: each query attends only to the latents that an indexer chooses. The
latents are in the blocks of the KV cache. The latents are used as keys and as values, for prompts
and in decoding.

The cache also contains an index key of each token. ``npu_lightning_indexer`` chooses keys by
comparing queries with the index keys of all tokens. ``npu_sparse_flash_attention`` attends to the
chosen latents. All lengths are tensors on the device, so a captured graph needs no update of these
operators.

If several ranks share a cache, each of them keeps all index keys and one shard of the latents. So
all ranks choose the same keys, and the choice needs no collective. For a request with few queries,
the rank of each shard computes the attention to the chosen keys of its shard. Then the results of
all shards are merged, weighted by their log-sum-exps. The operator returns log-sum-exps only if it
gets no block table. For this reason, the whole cache is passed as the keys of one request, and the
chosen keys are given as slots. For a request with many queries, every rank gathers all latents of
the request, and nothing is merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import (
    SPARSE_MODE_CAUSAL,
    SPARSE_MODE_NONE,
    AttentionMetadata,
    DeviceRows,
    ShardRows,
)
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.int8_latents import (
    ABSORBED_MODE,
    Int8LatentCache,
    attend_to_int8_latents,
    write_int8_latents,
)
from dist_aclgraph.layers.latent_attention import (
    LatentCache,
    absorb,
    compute_values,
    gather_queries,
    write_latents,
)
from dist_aclgraph.layers.prompt_attention import DeviceLaunch, attend_parts


@dataclass(frozen=True)
class SparseCache(LatentCache):
    """One layer's latents, rotated keys and index keys. The shape of the index keys is [num_blocks,
    tokens_per_block, 1, 128].

    Every rank keeps all index keys, even if the latents are sharded. A layer that uses the keys
    chosen by an earlier layer has no index keys.
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
        queries: [n, index heads, 128], rotated; keys: [n, 128], rotated.
        weights: [n, index heads], the weight of each head's score.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Choice(NamedTuple):
    """The keys that a layer's indexer chose.

    Attributes:
        keys: [num_direct, 1, top_k] int32, for each query, the positions of its chosen keys; the
            remaining elements are -1.
        own: [n, 1, top_k] int32, for each of the first n queries, the slots of the chosen keys that
            are on this shard; the remaining elements are -1. These n queries attend to chosen keys
            on all shards. None if there are no such queries.
    """

    keys: Tensor
    own: Tensor | None


def own_slots(chosen: Tensor, rows: ShardRows) -> Tensor:
    """Return, for each query, the slots of the chosen keys that are on this rank's shard; the
    remaining elements are -1.

    Args:
        chosen: [>= n, 1, top_k] int32, for each query, the positions of its chosen keys; the
            remaining elements are -1.

    Returns:
        [n, 1, top_k] int32.
    """
    shards = rows.place.shards
    size = shards.tokens_per_block
    positions = chosen[: len(rows.block_table)].squeeze(1)
    kept = torch.where(shards.owners(positions) == rows.place.shard, positions, -1)
    # Positions are sorted as float32, because int32 would be sorted on the slow AI CPU. Positions
    # below 2^24 are exact in float32.
    kept = kept.float().sort(-1, descending=True)[0].int()
    blocks = rows.block_table.gather(1, (kept // size).clamp(min=0).long())
    own = shards.own_slots(blocks * size + kept % size)
    return torch.where(kept < 0, -1, own).unsqueeze(1)


@dataclass(frozen=True)
class SparseLatentAttention:
    """Latent attention of this rank's heads to chosen keys.

    Attributes:
        norm: [512], weight of the latent's norm.
        keys, values: [heads, plain dim, 512] and [heads, value dim, 512], matrices. A head's
            matrices multiplied by a latent are the head's key and value.
        scale: factor by which attention scores are multiplied.
        top_k: maximum number of keys to which a query attends.
    """

    norm: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    top_k: int
    context: ContextParallel = UNDIVIDED

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
        cache: SparseCache | Int8LatentCache,
        metadata: AttentionMetadata,
        chosen: Choice | None,
    ) -> Choice | None:
        """Write latents, rotated keys and index keys to the cache, then compute attention into
        ``out``.

        Args:
            q: [num_tokens, heads, plain dim]; out: [num_tokens, heads, value dim]. Rows of ``out``
                after the live tokens stay unchanged.
            q_rope: [num_tokens, heads, 64], rotated.
            kv: [num_tokens, 512 + 64], neither normalised nor rotated.
            index: the projections that the indexer computes from the tokens; None if this layer has
                no indexer. Without an indexer, the layer uses ``chosen``, the keys that an earlier
                layer has chosen.
            rope: cos and sin, [num_tokens, 1, 1, 64] each.
            metadata: the metadata of the step, with int64 slots. Its attribute ``on_device`` must
                be set.

        Returns:
            The keys that were chosen for this rank's tokens; None if the step has no tokens.
        """
        if metadata.is_idle:
            return None
        rows = metadata.on_device
        assert rows is not None and metadata.num_direct == metadata.num_tokens
        self._write(kv, index, rope, cache, metadata, rows)
        if index is not None:
            chosen = self._choose(index, cache, metadata, rows)
        assert chosen is not None, "the first layer must have an indexer"
        if not self.context.is_sharded:
            if metadata.num_direct:
                self._attend_to_cache(q, q_rope, out, chosen, cache, metadata, rows)
            return chosen
        assert isinstance(cache, SparseCache), "shards contain latents in floats"
        if metadata.on_shards is not None:
            self._attend_to_shards(q, q_rope, out, chosen, cache, metadata.on_shards)
        if metadata.parts:
            self._attend_to_gathered(q, q_rope, out, chosen, cache, metadata)
        return chosen

    def _write(
        self,
        kv: Tensor,
        index: IndexRows | None,
        rope: tuple[Tensor, Tensor],
        cache: SparseCache | Int8LatentCache,
        metadata: AttentionMetadata,
        rows: DeviceRows,
    ) -> None:
        keys = None if index is None else index.keys
        if n := metadata.num_exchanged:
            assert metadata.written_rope is not None
            rope, widths = metadata.written_rope, [kv.shape[1]]
            if keys is not None:
                widths.append(keys.shape[1])
                kv = torch.cat([kv, keys], 1)
            kv, *others = torch.split(self.context.gather_new(kv, n), widths, 1)
            kv, keys = kv.contiguous(), others[0].contiguous() if others else None
        if isinstance(cache, Int8LatentCache):
            write_int8_latents(kv, self.norm, rope, cache.rows, rows.slots)
        else:
            write_latents(kv, self.norm, rope, cache, metadata.written)
        if keys is not None:
            assert cache.index_keys is not None
            torch.ops.npu.npu_scatter_nd_update_(
                cache.index_keys.flatten(0, 2), rows.slots, keys[: len(rows.slots)]
            )

    def _choose(
        self,
        index: IndexRows,
        cache: SparseCache | Int8LatentCache,
        metadata: AttentionMetadata,
        rows: DeviceRows,
    ) -> Choice:
        """Return the keys that the indexer chooses for this rank's tokens."""
        assert cache.index_keys is not None
        n = metadata.num_direct
        if n == 0:  # this rank has no tokens in this step
            return Choice(metadata.block_table.new_empty((0, 1, self.top_k)), None)
        keys = torch.ops.npu.npu_lightning_indexer(
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
        shards = metadata.on_shards
        return Choice(keys, None if shards is None else own_slots(keys, shards))

    def _attend_to_cache(
        self,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        chosen: Choice,
        cache: SparseCache | Int8LatentCache,
        metadata: AttentionMetadata,
        rows: DeviceRows,
    ) -> None:
        n, table = metadata.num_direct, metadata.block_table
        if isinstance(cache, Int8LatentCache):
            query = torch.cat([absorb(q[:n], self.keys), q_rope[:n]], -1)
            attended = attend_to_int8_latents(
                query, cache.rows, chosen.keys, self.scale, table, rows
            )
        else:
            attended, *_ = self._attend(
                absorb(q[:n], self.keys),
                q_rope[:n],
                (cache.latents, cache.rope_keys),
                chosen.keys,
                rows.query_ends,
                rows.kv_lens,
                block_table=table,
                layout_kv="PA_BSND",
                sparse_mode=SPARSE_MODE_CAUSAL,
            )
        compute_values(attended.transpose(0, 1), self.values, out[:n])

    def _attend_to_shards(
        self,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        chosen: Choice,
        cache: SparseCache,
        rows: ShardRows,
    ) -> None:
        own, context = chosen.own, self.context
        assert own is not None
        n = len(own)
        queries = gather_queries(context, absorb(q[:n], self.keys), q_rope[:n])
        latents, rope_keys = (x.flatten(0, 1) for x in (cache.latents, cache.rope_keys))
        attended, greatest, sums = self._attend(
            *queries,
            (latents, rope_keys),
            own,
            rows.query_ends,
            rows.query_ends.new_full((1,), len(latents)),
            layout_kv="TND",
            sparse_mode=SPARSE_MODE_NONE,
            return_softmax_lse=True,
        )
        logs = (greatest + sums.log()).view(n, -1, 1)  # one KV head: [1, n, heads]
        merged = context.merge(attended, logs, own[:, :, :1] < 0).to(q.dtype)
        compute_values(merged.transpose(0, 1), self.values, out[:n])

    def _attend_to_gathered(
        self,
        q: Tensor,
        q_rope: Tensor,
        out: Tensor,
        chosen: Choice,
        cache: SparseCache,
        metadata: AttentionMetadata,
    ) -> None:
        assert metadata.tasks is None, "graphs contain requests with few queries only"

        def attend(
            each: DeviceLaunch, rows: Sequence[Tensor], found: Tensor, sums: Tensor | None
        ) -> None:
            run = slice(each.launch.start, each.launch.stop)
            latents, rope_keys = rows
            assert each.ends is not None and sums is None, "a request is read at once"
            attended, *_ = self._attend(
                absorb(q[run], self.keys),
                q_rope[run],
                (latents, rope_keys),
                chosen.keys[run],
                *each.ends,
                layout_kv="TND",
                sparse_mode=SPARSE_MODE_CAUSAL,
            )
            compute_values(attended.transpose(0, 1), self.values, found)

        caches = [x.flatten(0, 1) for x in (cache.latents, cache.rope_keys)]
        attend_parts(metadata.parts, caches, self.context, attend, out)

    def _attend(
        self,
        absorbed: Tensor,
        q_rope: Tensor,
        keys: tuple[Tensor, Tensor],
        chosen: Tensor,
        query_ends: Tensor,
        kv_lens: Tensor,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors. The first is the weighted sum of latents for each query, [n, heads,
        512]. The other two contain, for each query and head, the greatest score and the sum of the
        exponentials, [1, n, heads] float32 each. These two are valid only if ``arguments`` (further
        arguments of the operator) requests them.

        Args:
            keys: latents and rotated keys.
        """
        latents, rope_keys = keys
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.npu.npu_sparse_flash_attention(
            absorbed,
            latents,
            latents,
            chosen,
            self.scale,
            actual_seq_lengths_query=query_ends,
            actual_seq_lengths_kv=kv_lens,
            query_rope=q_rope,
            key_rope=rope_keys,
            layout_query="TND",
            attention_mode=ABSORBED_MODE,
            **arguments,
        )
        return found
