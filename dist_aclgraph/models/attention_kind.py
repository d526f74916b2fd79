"""What a decoder asks of a kind of attention: one layer's part, and what all layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_aclgraph.ints import IntArray
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.models.loading import WeightSlices

Rope = tuple[Tensor, Tensor]  # cos and sin of a step's tokens, in the shape that the kind wants
Cache = Any  # of one layer; known to the kind that made it
Upload = Callable[[IntArray], Tensor]


class LayerAttention(Protocol):
    """The attention of one layer, in three parts: graphs in pieces hold the first and the last."""

    def project(self, h: Tensor, rope: Rope) -> tuple[Tensor, ...]:
        """[n, hidden] -> what ``attend`` takes; the last is room for its result."""

    def attend(
        self, inputs: tuple[Tensor, ...], rope: Rope, cache: Cache, metadata: AttentionMetadata
    ) -> None:
        """Write the live tokens to the cache and fill ``inputs[-1]``; padding rows are left."""

    def output(self, attended: Tensor) -> Tensor:
        """[n, heads, head_dim] -> [n, hidden], summed over the ranks."""


class AttentionKind(Protocol):
    """What all layers of a decoder share of their attention. Owns the rotary tables."""

    def load(self, slices: WeightSlices, prefix: str) -> LayerAttention:
        """Return this rank's attention of the layer whose names begin so."""

    def rope(self, positions: Tensor) -> Rope:
        """Gather the rows of [n] int32 positions."""

    def make_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> Cache:
        """Return one layer's cache. Padding reads block 0, so it must not hold NaN."""

    def prepare(
        self, metadata: AttentionMetadata, block_table: IntArray, block_size: int, upload: Upload
    ) -> AttentionMetadata:
        """Add what this kind of attention computes once for all layers of a step.

        Args:
            block_table: [num_reqs, num_blocks], the host's; empty where a graph is captured.
        """
