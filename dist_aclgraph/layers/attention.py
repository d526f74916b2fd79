"""Grouped-query attention over the paged KV cache. Attention runs eagerly, or it is captured as a
task of a graph. Before a replay, the KV lengths of a captured task can be updated.

Operators: ``npu_scatter_pa_kv_cache`` writes the cache at slots, which are read from a tensor.
``npu_fused_infer_attention_score`` computes attention in the layout TND, and gets the lengths as
lists on the host. In graphs whose lengths are never updated, the layout is BSND, and a mask hides
the keys after each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.device import npu
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.prompt_attention import DeviceLaunch, DevicePart, attend_parts
from dist_aclgraph.layers.state_metadata import StateMetadata

Arguments = dict[str, Any]  # arguments of an operator, by name

CAUSAL_MASK_SIZE = 2048  # sparse modes 3 and 4 always require a mask of this size
SPARSE_MODE_NONE, SPARSE_MODE_CAUSAL, SPARSE_MODE_BAND = 0, 3, 4


@dataclass(frozen=True)
class AttentionOperator:
    """An attention operator of torch_npu that gets query and KV lengths as lists on the host.

    Attributes:
        query_ends, kv_lens: names of the operator's arguments for cumulative query lengths and KV
            lengths.
        sums: name of the operator's argument that requests the log-sum-exps.
    """

    name: str
    query_ends: str
    kv_lens: str
    sums: str

    @cached_property
    def overload(self) -> Any:
        """The overload that writes the operator's results to given tensors."""
        return getattr(torch.ops.npu, self.name).out

    @cached_property
    def update_at_once(self) -> Any:
        """The function that updates a captured task in one call; None if torch_npu has no such
        function.
        """
        return npu.update_at_once(self.name)

    def max_workspace(self, arguments: Arguments) -> Tensor:
        """Return a workspace that is large enough for all query and KV lengths."""
        sizing = getattr(torch.ops.npu, f"_{self.name}_get_max_workspace")
        workspace: Tensor = sizing(**arguments)
        return workspace


FUSED_ATTENTION = AttentionOperator(
    "npu_fused_infer_attention_score",
    "actual_seq_lengths",
    "actual_seq_lengths_kv",
    "softmax_lse_flag",
)


FUSED_ATTENTION_V2 = AttentionOperator(
    "npu_fused_infer_attention_score_v2",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "return_softmax_lse",
)


class AttentionTasks(Protocol):
    """Records the attention operators of a captured graph, so that a replay can patch them."""

    def run(self, operator: AttentionOperator, outputs: list[Tensor], arguments: Arguments) -> None:
        """Capture the operator as a task whose lengths can be updated. The operator writes to
        ``outputs``.
        """


@dataclass(frozen=True)
class DeviceRows:
    """Tensors on the device: the lengths of requests that attend directly (see
    ``AttentionMetadata``), and the slots of new keys.

    Some operators read their lengths on the device. In a captured graph, these operators need no
    update. If the KV cache is sharded, these lengths and slots refer to the cache of index keys,
    which is not sharded.

    Attributes:
        query_ends, kv_lens: [num_reqs] int32, as in ``AttentionMetadata``.
        slots: [num_written, 1] int32, slots of the cache of index keys. Padding has a slot of the
            dummy block. (The operator that writes the rows refuses slot -1.)
        num_seen: [num_direct] int32, the number of keys to which each query attends; None if an
            indexer chooses the keys.
    """

    query_ends: Tensor
    kv_lens: Tensor
    slots: Tensor
    num_seen: Tensor | None = None


@dataclass(frozen=True)
class ShardRows:
    """The first tokens of a step, for which an indexer chooses keys on all shards. Each rank
    computes the attention of these tokens to those chosen keys that are on its own shard.

    Attributes:
        place: the index of this rank in each context parallel group, and the index of its shard.
        block_table: [n, max_blocks] int32, the blocks of each token's request.
        query_ends: [1] int32, contains n. For the operator, the n tokens are the queries of one
            request, and all keys of the shard are its keys.
    """

    place: ContextPlace
    block_table: Tensor
    query_ends: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The slots, blocks and lengths of a step's tokens. All layers use the same object.

    The first tokens of the step attend directly through the block table; ``parts`` describes the
    attention of the other tokens. If the cache is sharded, the operator gets each directly
    attending token as a separate request. The reason: from one token to the next, the KV length on
    a shard does not always grow by one.

    Attributes:
        num_tokens: number of live tokens of this rank; activations can have more rows, for padding.
        written: [num_written], the slots to which new KV is written; nothing is written to slot -1.
            The slots are in the order of this rank's live tokens. If prompts are split, ``written``
            contains the slots for the tokens of all PCP ranks, rank by rank.
        num_exchanged: if prompts are split, the number of elements of ``written`` for each PCP
            rank; otherwise 0.
        written_rope: the rows of cosines and sines for the tokens in ``written``; None if writing
            the cache does not need them.
        block_table: [num_reqs, max_blocks] int32, the blocks of requests that attend directly.
        query_ends: [num_reqs], cumulative query lengths; the last element is the number of tokens
            that attend directly.
        kv_lens: [num_reqs], KV length of each request on this shard, its queries included.
        is_empty: [num_direct, 1, 1] bool, true if the shard has no key to which the token may
            attend. The KV length of such a token is 1. None if the cache is not sharded.
        causal_mask: [2048, 2048] bool, the result of ``make_causal_mask``.
        is_causal: whether requests that attend directly need the causal mask.
        hidden_keys: [num_reqs, 1, 1, kv_len] bool, true for the keys to which a request must not
            attend. With this mask, the operator gets one query and kv_len keys for every request.
            Keys after the request's own keys are padding. None if ``kv_lens`` contains the real
            lengths of the requests.
        on_device: lengths and slots for a kind of attention that reads lengths on the device; None
            for other kinds.
        on_shards: the tokens that attend to chosen keys on all shards; see ``ShardRows``. None if
            no indexer chooses keys, if the cache is not sharded, or if there are no such tokens.
        tasks: records the operators of the captured graph; None in an eager step.
        is_in_pieces: whether the parts of layers before and after attention run in piecewise
            graphs.
        states: the slots of recurrent states that the step uses. None if the model has no recurrent
            state, or if no request is live.
    """

    num_tokens: int
    written: Tensor
    block_table: Tensor
    query_ends: list[int]
    kv_lens: list[int]
    causal_mask: Tensor
    is_causal: bool
    hidden_keys: Tensor | None = None
    num_exchanged: int = 0
    written_rope: tuple[Tensor, Tensor] | None = None
    is_empty: Tensor | None = None
    parts: tuple[DevicePart, ...] = ()
    on_device: DeviceRows | None = None
    on_shards: ShardRows | None = None
    tasks: AttentionTasks | None = None
    is_in_pieces: bool = False
    states: StateMetadata | None = None

    @property
    def num_direct(self) -> int:
        return self.query_ends[-1] if self.query_ends else 0

    @property
    def attends_directly(self) -> bool:
        """True if the cache is not sharded, and all tokens of the step attend directly."""
        return not self.parts and self.num_exchanged == 0 and self.is_empty is None

    @property
    def is_idle(self) -> bool:
        """True if this rank, and all ranks with which it splits prompts, have no tokens."""
        return self.num_tokens == 0 and self.num_exchanged == 0

    def mask_arguments(self, *, is_causal: bool, window: int | None = None) -> Arguments:
        """Return the operator's arguments that say which keys are hidden from which queries.

        Args:
            window: number of latest keys to which a query attends, including the key of the same
                token; None means all keys up to this key.
        """
        if window is not None:
            return {
                "atten_mask": self.causal_mask,
                "sparse_mode": SPARSE_MODE_BAND,
                "pre_tokens": window - 1,
                "next_tokens": 0,
            }
        return {
            "atten_mask": self.causal_mask if is_causal else None,
            "sparse_mode": SPARSE_MODE_CAUSAL if is_causal else SPARSE_MODE_NONE,
        }


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, num_kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def states(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class PagedAttention:
    """Grouped-query attention of this rank's heads.

    Attributes:
        num_kv_heads: number of KV heads on this rank. For these heads, the rank's cache contains
            all tokens, or only a shard of the tokens.
        window: number of latest keys to which a query attends, including its own key; None means
            all keys. With a window, there is no context parallelism.
        sinks: [num_heads], for each head, an additional logit of the softmax that belongs to no key
            and no value; None if the model has no sinks. With sinks, there is no context
            parallelism.
        scale: factor by which scores are multiplied; None means ``head_dim ** -0.5``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: ContextParallel = UNDIVIDED
    window: int | None = None
    sinks: Tensor | None = None
    scale: float | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Write k and v to the cache, then compute attention into ``out``. Padding rows of ``out``
        stay unchanged.

        Args:
            q, out: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim].
        """
        if metadata.is_idle:
            return
        self._write(k, v, cache, metadata)
        n = metadata.num_direct
        if metadata.hidden_keys is not None:
            self._attend_padded(q[:n], out[:n], cache, metadata)
        elif n:
            self._attend_directly(q[:n], out[:n], cache, metadata)
        if metadata.parts:
            self._attend_parts(q, out, cache, metadata)

    def _write(self, k: Tensor, v: Tensor, cache: KVCache, metadata: AttentionMetadata) -> None:
        if n := metadata.num_exchanged:
            both = self.context.gather_new(torch.cat([k, v], 1), n)
            k, v = (x.contiguous() for x in torch.split(both, self.num_kv_heads, 1))
        else:
            k, v = k[: metadata.num_tokens], v[: metadata.num_tokens]
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k, v, cache.keys, cache.values, metadata.written, cache_mode="Norm"
        )

    def _attend_padded(
        self, q: Tensor, out: Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> None:
        """Compute attention for one query of each request. All requests have the same number of
        keys, and a mask hides padding keys.
        """
        assert self.window is None and self.sinks is None
        arguments: Arguments = {
            "query": q.unsqueeze(1),  # [num_reqs, 1, num_heads, head_dim]
            "atten_mask": metadata.hidden_keys,
            "sparse_mode": SPARSE_MODE_NONE,
            FUSED_ATTENTION.kv_lens: metadata.kv_lens,
            **self._pages(cache, metadata),
            **self._heads(q.shape[1]),
            "input_layout": "BSND",
        }
        run_now(FUSED_ATTENTION, arguments, out.unsqueeze(1), None)

    def _attend_directly(
        self, q: Tensor, out: Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> None:
        context, is_empty = self.context, metadata.is_empty
        q = context.gather_heads(q)
        found, sums = out, None
        if is_empty is not None:
            found = torch.empty_like(q)
            sums = q.new_empty((*q.shape[:2], 1), dtype=torch.float32)
        arguments: Arguments = {
            "query": q,
            **self._pages(cache, metadata),
            **self._heads(q.shape[1]),
            **metadata.mask_arguments(is_causal=metadata.is_causal, window=self.window),
        }
        operator = FUSED_ATTENTION
        if self.sinks is not None:
            operator = FUSED_ATTENTION_V2
            arguments |= {"learnable_sink": self.sinks}
        launch(operator, arguments, metadata, found, sums)
        if is_empty is not None and sums is not None:
            out.copy_(context.merge(found, sums, is_empty))

    def _attend_parts(
        self, q: Tensor, out: Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> None:
        def attend(
            each: DeviceLaunch, rows: Sequence[Tensor], found: Tensor, sums: Tensor | None
        ) -> None:
            run = each.launch
            arguments: Arguments = {
                "query": q[run.start : run.stop],
                "key": rows[0],
                "value": rows[1],
                FUSED_ATTENTION.query_ends: run.query_ends,
                FUSED_ATTENTION.kv_lens: run.kv_ends,
                **self._heads(self.num_heads),
                **metadata.mask_arguments(is_causal=run.is_causal),
            }
            run_now(FUSED_ATTENTION, arguments, found, sums)

        caches = cache.keys.flatten(0, 1), cache.values.flatten(0, 1)
        attend_parts(metadata.parts, caches, self.context, attend, out)

    def _pages(self, cache: KVCache, metadata: AttentionMetadata) -> Arguments:
        return {
            "key": cache.keys.flatten(2),  # [num_blocks, block_size, num_kv_heads * head_dim]
            "value": cache.values.flatten(2),
            "block_table": metadata.block_table,
            "block_size": cache.block_size,
        }

    def _heads(self, num_heads: int) -> Arguments:
        heads, scale = "num_heads", "scale"
        if self.sinks is not None:
            # version 2 of the operator has these names for the two arguments
            heads, scale = "num_query_heads", "softmax_scale"
        return {
            heads: num_heads,
            "num_key_value_heads": self.num_kv_heads,
            scale: self.head_dim**-0.5 if self.scale is None else self.scale,
            "input_layout": "TND",
        }


def launch(
    operator: AttentionOperator,
    arguments: Arguments,
    metadata: AttentionMetadata,
    out: Tensor,
    sums: Tensor | None,
) -> None:
    """Run the attention of the tokens that attend directly, or capture it as a task of a graph.

    Args:
        arguments: all arguments of the operator except lengths and outputs.
        out: receives the result.
        sums: float32, receives the log-sum-exps; None if they are not needed.
    """
    arguments[operator.query_ends] = metadata.query_ends
    arguments[operator.kv_lens] = metadata.kv_lens
    if metadata.tasks is None:
        run_now(operator, arguments, out, sums)
    else:
        metadata.tasks.run(operator, _outputs(operator, arguments, out, sums), arguments)


def run_now(
    operator: AttentionOperator, arguments: Arguments, out: Tensor, sums: Tensor | None
) -> None:
    """Run an attention operator; the arguments must include the lengths."""
    operator.overload(out=_outputs(operator, arguments, out, sums), **arguments)


def _outputs(
    operator: AttentionOperator, arguments: Arguments, out: Tensor, sums: Tensor | None
) -> list[Tensor]:
    arguments[operator.sums] = sums is not None
    return [out, out.new_empty(1, dtype=torch.float32) if sums is None else sums]


def make_causal_mask(device: torch.device) -> Tensor:
    """Return the mask of sparse modes 3 and 4, [2048, 2048]. It is True above the diagonal; True
    hides a key.
    """
    shape = (CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE)
    return torch.ones(shape, dtype=torch.bool).triu(1).to(device)
