"""Attention over the paged KV cache, eagerly or as an updatable task of a graph under capture.

Operators: ``npu_scatter_pa_kv_cache`` (its address is fixed, the slot is data) and
``npu_fused_infer_attention_score`` in layout TND, whose lengths are host lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_aclgraph.layers.latent_forms import PlainPart

CAUSAL_MASK_SIZE = 2048  # what sparse_mode 3 demands, whatever the lengths
SPARSE_MODE_NONE, SPARSE_MODE_CAUSAL = 0, 3


@dataclass(frozen=True)
class AttentionOperator:
    """An operator of torch_npu whose lengths are host lists.

    Attributes:
        query_ends, kv_lens: what it calls the cumulative query lengths and the KV lengths.
    """

    name: str
    query_ends: str
    kv_lens: str

    @property
    def overload(self) -> Any:
        """The form that writes to given tensors."""
        return getattr(torch.ops.npu, self.name).out

    def max_workspace(self, arguments: dict[str, Any]) -> Tensor:
        """Return a workspace that suffices whatever the lengths."""
        sizing = getattr(torch.ops.npu, f"_{self.name}_get_max_workspace")
        workspace: Tensor = sizing(**arguments)
        return workspace


FUSED_ATTENTION = AttentionOperator(
    "npu_fused_infer_attention_score", "actual_seq_lengths", "actual_seq_lengths_kv"
)


class AttentionTasks(Protocol):
    """Where a graph under capture keeps its attention operators, so that replay can patch them."""

    def run(self, operator: AttentionOperator, out: Tensor, arguments: dict[str, Any]) -> None:
        """Capture the operator, writing to ``out``, as a task group of its own."""


@dataclass(frozen=True, kw_only=True)
class LatentStep:
    """What latent attention must know of a step: the absorbed requests, and the plain parts.

    Attributes:
        num_absorbed_tokens: the first so many tokens are absorbed.
        query_ends, kv_lens: [num_absorbed].
        block_table: [num_absorbed, max_blocks] int32.
        kv_slots: slots of all KV tokens of the requests in plain form, None where none is.
    """

    num_absorbed_tokens: int
    query_ends: list[int]
    kv_lens: list[int]
    block_table: Tensor
    plain: tuple[PlainPart, ...] = ()
    kv_slots: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of a step stand; one value for all layers.

    Attributes:
        slot_mapping: [num_tokens] int32, -1 is padding and written nowhere; shorter than the
            activations where these are padded and attention is not. For latent attention int64.
        block_table: [num_reqs, max_blocks] int32.
        query_ends: cumulative query lengths [num_reqs]; the last is num_tokens.
        kv_lens: KV length of each request, its queries included [num_reqs].
        causal_mask: [2048, 2048] bool, or None where every request has one query.
        tasks: the graph under capture, or None in an eager step.
        latent: for latent attention only.
    """

    slot_mapping: Tensor
    block_table: Tensor
    query_ends: list[int]
    kv_lens: list[int]
    causal_mask: Tensor | None = None
    tasks: AttentionTasks | None = None
    latent: LatentStep | None = None


@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values: [num_blocks, block_size, num_kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


@dataclass(frozen=True)
class PagedAttention:
    """Grouped-query attention of this rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Write k and v to the cache, then attend; rows beyond the slot mapping are left alone.

        Args:
            q, out: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim].
        """
        num_live = metadata.slot_mapping.shape[0]
        if num_live == 0:
            return
        if num_live < q.shape[0]:
            q, k, v, out = q[:num_live], k[:num_live], v[:num_live], out[:num_live]
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k, v, cache.keys, cache.values, metadata.slot_mapping, cache_mode="Norm"
        )
        arguments: dict[str, Any] = {
            "query": q,
            "key": cache.keys.flatten(2),  # [num_blocks, block_size, num_kv_heads * head_dim]
            "value": cache.values.flatten(2),
            "atten_mask": metadata.causal_mask,
            "block_table": metadata.block_table,
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "scale": self.head_dim**-0.5,
            "input_layout": "TND",
            "block_size": cache.block_size,
            "sparse_mode": (
                SPARSE_MODE_NONE if metadata.causal_mask is None else SPARSE_MODE_CAUSAL
            ),
        }
        lens = metadata.query_ends, metadata.kv_lens
        launch(FUSED_ATTENTION, arguments, *lens, out, metadata.tasks)


def launch(
    operator: AttentionOperator,
    arguments: dict[str, Any],
    query_ends: list[int],
    kv_lens: list[int],
    out: Tensor,
    tasks: AttentionTasks | None,
) -> None:
    """Run an attention operator into ``out``, or capture it as a task of a graph.

    Args:
        arguments: all but the lengths.
    """
    arguments[operator.query_ends], arguments[operator.kv_lens] = query_ends, kv_lens
    if tasks is not None:
        tasks.run(operator, out, arguments)
    else:
        no_lse = torch.empty(1, dtype=torch.float32, device=out.device)
        operator.overload(**arguments, out=[out, no_lse])


def make_causal_mask(device: torch.device) -> Tensor:
    """Return the [2048, 2048] mask of sparse_mode 3: True above the diagonal is hidden."""
    shape = (CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE)
    return torch.ones(shape, dtype=torch.bool).triu(1).to(device)
