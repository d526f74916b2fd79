"""Computes which bytes of KV blocks in one layout are which bytes of blocks in another layout.

Groups of different layouts divide the same KV differently: by heads, by shards of the context, and
into blocks of different sizes. The plan is computed from the layouts alone. It holds for every run
of blocks whose first token has the same position in both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import KVCacheError

Int64Array = npt.NDArray[np.int64]

# Columns of a span: place, block and first byte in the source; the same in the target; length.
SOURCE, SOURCE_BLOCK, SOURCE_BYTE, TARGET, TARGET_BLOCK, TARGET_BYTE, LENGTH = range(7)


@dataclass(frozen=True)
class BlockTensor:
    """A tensor of one layer, as a part of each block: [slots, heads, bytes of a head].

    Attributes:
        num_heads: number of heads of the model; 1 for latents and for the keys of an indexer.
        head_bytes: bytes of one head of one token.
        is_whole: whether every place keeps all tokens and all heads.
    """

    num_heads: int
    head_bytes: int
    is_whole: bool = False


@dataclass(frozen=True)
class BlockLayout:
    """How a group divides the KV of a request.

    A place is a part of the KV that one rank keeps; ranks with copies have the same place. Place
    ``h * shards.count + s`` has the h-th part of the heads of the s-th shard's tokens. Its blocks
    contain the tensors one after another, as files of blocks do.

    Attributes:
        tensors: the tensors of all layers, in order.
        num_parts: number of parts into which the heads are divided.
        shards: how the tokens are divided.

    Raises:
        KVCacheError: a tensor's heads cannot be divided evenly.
    """

    tensors: tuple[BlockTensor, ...]
    num_parts: int
    shards: Shards

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            if not tensor.is_whole and tensor.num_heads % self.num_parts:
                raise KVCacheError(
                    f"{tensor.num_heads} heads cannot be divided into {self.num_parts} equal parts"
                )

    @property
    def num_places(self) -> int:
        return self.num_parts * self.shards.count

    def heads_of(self, tensor: BlockTensor) -> int:
        """Return the number of a tensor's heads in each place."""
        return tensor.num_heads if tensor.is_whole else tensor.num_heads // self.num_parts

    def shards_of(self, tensor: BlockTensor) -> Shards:
        """Return how the tokens of a tensor are divided."""
        return Shards(self.shards.tokens_per_block) if tensor.is_whole else self.shards

    def _bytes_of(self, tensor: BlockTensor) -> int:
        slots = self.shards_of(tensor).block_size
        return slots * self.heads_of(tensor) * tensor.head_bytes

    @cached_property
    def starts(self) -> Int64Array:
        """[num_tensors], first byte of each tensor in a block."""
        return np.cumsum([0, *map(self._bytes_of, self.tensors[:-1])], dtype=np.int64)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in each place."""
        return sum(map(self._bytes_of, self.tensors))


def plan_copies(source: BlockLayout, target: BlockLayout) -> tuple[int, Int64Array]:
    """Return a number of tokens that fills whole blocks in both layouts, and the copies of these
    tokens.

    Each byte of the target's blocks is copied once. All source places have equal copies of a whole
    tensor; the places of the target read them in turn.

    Returns:
        The number of tokens; [n, 7], spans as long as possible, in the order of the target.

    Raises:
        KVCacheError: the layouts are of different models.
    """
    if source.tensors != target.tensors:
        raise KVCacheError("the tensors of the two layouts differ, so their blocks do too")
    num_tokens = math.lcm(source.shards.tokens_per_block, target.shards.tokens_per_block)
    found = [
        _joined(np.concatenate(list(_spans_of_place(source, target, place, num_tokens))))
        for place in range(target.num_places)
    ]
    return num_tokens, np.concatenate(found)


def _spans_of_place(
    source: BlockLayout, target: BlockLayout, place: int, num_tokens: int
) -> Iterator[Int64Array]:
    """Yield the spans of each tensor in a place of the target."""
    tensors = target.tensors
    kinds = {each: _spans_of_tensor(source, target, place, each, num_tokens) for each in tensors}
    for index, tensor in enumerate(tensors):
        spans = kinds[tensor].copy()
        spans[:, SOURCE_BYTE] += source.starts[index]
        spans[:, TARGET_BYTE] += target.starts[index]
        yield spans


def _spans_of_tensor(
    source: BlockLayout, target: BlockLayout, place: int, tensor: BlockTensor, num_tokens: int
) -> Int64Array:
    """Return the spans of one tensor; their bytes are counted from the tensor's first byte."""
    part, shard = divmod(place, target.shards.count)
    ours, theirs = target.shards_of(tensor), source.shards_of(tensor)
    positions = np.arange(num_tokens, dtype=np.int64)
    if not tensor.is_whole:
        positions = positions[ours.owners(positions) == shard]
    own, other = ours.own_slots(positions), theirs.own_slots(positions)
    if tensor.is_whole:
        part, parts = 0, [(0, 0, tensor.num_heads)]
        places = np.full(len(positions), place % source.num_places)
    else:
        parts = list(_common_heads(source.heads_of(tensor), target.heads_of(tensor), part))
        places = theirs.owners(positions)
    found = np.empty((len(positions), len(parts), 7), np.int64)
    for index, (holder, first, count) in enumerate(parts):
        spans = found[:, index]
        spans[:, SOURCE] = holder * source.shards.count + places
        spans[:, SOURCE_BLOCK], slots = np.divmod(other, theirs.block_size)
        heads = source.heads_of(tensor)
        spans[:, SOURCE_BYTE] = (slots * heads + first - holder * heads) * tensor.head_bytes
        spans[:, TARGET] = place
        spans[:, TARGET_BLOCK], slots = np.divmod(own, ours.block_size)
        heads = target.heads_of(tensor)
        spans[:, TARGET_BYTE] = (slots * heads + first - part * heads) * tensor.head_bytes
        spans[:, LENGTH] = count * tensor.head_bytes
    return _joined(found.reshape(-1, 7))


def _common_heads(source: int, target: int, part: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of the source that have heads of a target's part, with the first of these
    heads and their number.

    Args:
        source, target: number of heads in each part of source and target.
    """
    first, end = part * target, (part + 1) * target
    for holder in range(first // source, -(-end // source)):
        low, high = max(first, holder * source), min(end, (holder + 1) * source)
        yield holder, low, high - low


def _joined(spans: Int64Array) -> Int64Array:
    """Sort spans by their target, and join neighbours that are neighbours in the source, too."""
    spans = spans[np.lexsort((spans[:, TARGET_BYTE], spans[:, TARGET_BLOCK], spans[:, TARGET]))]
    before, after = spans[:-1], spans[1:]
    same = [SOURCE, SOURCE_BLOCK, TARGET, TARGET_BLOCK]
    bytes_ = [SOURCE_BYTE, TARGET_BYTE]
    follows = (before[:, same] == after[:, same]).all(axis=1)
    follows &= (before[:, bytes_] + before[:, [LENGTH]] == after[:, bytes_]).all(axis=1)
    first = np.flatnonzero(np.r_[True, ~follows])
    joined = spans[first]
    joined[:, LENGTH] = np.add.reduceat(spans[:, LENGTH], first)
    return joined
