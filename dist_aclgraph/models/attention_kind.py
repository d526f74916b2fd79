"""The interface of a kind of attention: the part of one layer, and the part that layers share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.models.loading import WeightSlices

Rope = tuple[Tensor, Tensor]  # cos and sin of a step's tokens, in the shape that the kind wants
Cache = Any  # of one layer; known to the kind that made it


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
    """The attention state that all layers of a decoder share. Owns the rotary tables.

    Attributes:
        slot_dtype: of the slots that its cache write takes.
        takes_long_queries: whether requests with any number of queries may attend directly, as long
            as the cache is not sharded.
        ropes_written: whether its cache write rotates, and wants rotary rows.
    """

    slot_dtype: torch.dtype
    takes_long_queries: bool
    ropes_written: bool

    def load(self, slices: WeightSlices, index: int) -> LayerAttention:
        """Return this rank's attention of layer ``index``."""

    def rope(self, positions: Tensor) -> Rope:
        """Gather the rows of [n] int32 positions."""

    def make_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> Cache:
        """Return one layer's cache. Padding reads block 0, so it must not hold NaN."""
