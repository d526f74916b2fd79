"""The interfaces of a kind of attention: one interface for the attention of a single layer, and one
for the data that all layers of the kind share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.int8_rows import Rows
from dist_aclgraph.models.loading import WeightSlices

Rope = tuple[Tensor, Tensor]  # cos and sin of a step's tokens, in the shape that the kind needs
# Cache of one layer. The tensors in ``tensors`` are divided into blocks, and the tensors in
# ``states`` into slots. Only the layer's kind of attention knows the concrete type of the cache.
Cache = Any


@dataclass(frozen=True)
class CacheRoom:
    """The capacity of a layer's cache, and the types of its elements.

    Attributes:
        num_blocks: number of KV blocks, the dummy block included.
        num_slots: number of slots of recurrent states, including slot 0 for padding. 0 if the model
            has no recurrent state.
        dtype: type of keys and values.
        int8_latents: whether latent attention stores latents in int8.
    """

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    num_slots: int = 0
    int8_latents: bool = False


class LayerAttention(Protocol):
    """The attention of one layer, in three parts: ``project``, ``attend`` and ``output``. Piecewise
    graphs contain ``project`` and ``output``.
    """

    @property
    def quantises_rows(self) -> bool:
        """Whether all products that read the input of ``project`` are int8 products."""

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Compute the inputs of ``attend`` from [n, hidden]. The last input is a tensor that
        receives the result of ``attend``.

        Args:
            metadata: the metadata of the step; None in piecewise graphs, because such a graph is
                replayed by steps with different metadata.
        """

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: Cache,
        metadata: AttentionMetadata,
        earlier: Any,
    ) -> Any:
        """Write the keys and values (or latents) of the live tokens to the cache, and write the
        results of attention to ``inputs[-1]``. Padding rows of ``inputs[-1]`` stay unchanged.

        Args:
            earlier: the result of ``attend`` in the previous layer; None in the first layer.

        Returns:
            Data that later layers use, such as the chosen keys; None if there are no such data.
        """

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Map the results of attention, which are in ``inputs[-1]``, to [n, hidden], summed over
        the ranks.
        """


class AttentionKind(Protocol):
    """The data and functions that all layers with the same kind of attention share."""

    def load(self, slices: WeightSlices, index: int) -> LayerAttention:
        """Return the attention of layer ``index`` on this rank."""

    def make_cache(self, room: CacheRoom) -> Cache:
        """Return one layer's cache. Block 0 and slot 0 must not contain NaN, because padding tokens
        read both.
        """


class PagedKind(AttentionKind, Protocol):
    """A kind of attention that keeps keys in blocks. Owns the rotary tables.

    Attributes:
        slot_dtype: type of slot numbers that the operator needs to write the cache.
        takes_long_queries: whether a request with many query tokens may attend directly to the
            cache, if the cache is not sharded.
        ropes_written: whether keys are rotated when they are written to the cache, so that the
            write needs rows of cos and sin.
        reads_device_rows: whether attention reads the lengths of requests on the device. This is
            true for attention to chosen keys, and for attention to latents in int8. If the cache is
            sharded, a length is the number of index keys, because every rank has all index keys.
        chooses_keys: whether an indexer chooses the keys to which a query attends.
    """

    slot_dtype: torch.dtype
    takes_long_queries: bool
    ropes_written: bool
    reads_device_rows: bool
    chooses_keys: bool

    def rope(self, positions: Tensor) -> Rope:
        """Return the rows of cos and sin for [n] int32 positions."""
