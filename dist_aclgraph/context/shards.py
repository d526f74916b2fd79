"""Computes which shard of a request's KV cache keeps a token, and the token's slot on this shard.

The first ``interleave`` tokens belong to shard 0, the next ``interleave`` tokens to shard 1, and so
on; after the last shard comes shard 0 again. A block id means one block on every shard; together
these blocks contain ``tokens_per_block`` neighbouring tokens. vLLM's decode context parallelism
uses the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dist_aclgraph.config import Config
from dist_aclgraph.ints import IntArray

PADDING_SLOT = -1  # slot of padding: nothing is written, and no expert runs the token
FOREIGN_SLOT = -2  # slot of a token that another shard keeps


@dataclass(frozen=True)
class Shards:
    """How caches are divided between shards.

    Attributes:
        block_size: number of tokens of a block on one shard.
        count: number of shards; if it is 1, caches are not divided.
        interleave: number of neighbouring tokens on one shard; divides ``block_size``.
    """

    block_size: int
    count: int = 1
    interleave: int = 1

    @classmethod
    def from_config(cls, config: Config) -> Shards:
        parallel = config.parallel
        return cls(config.kv.block_size, parallel.dcp, parallel.cp_interleave)

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens in the blocks of one block id, on all shards together."""
        return self.block_size * self.count

    def owners(self, positions: IntArray) -> IntArray:
        """Return which shard keeps the token at each position."""
        return positions // self.interleave % self.count

    def lengths(self, lens: IntArray, shard: int) -> IntArray:
        """Return how many of a request's first ``lens`` tokens one shard keeps."""
        if self.count == 1:
            return lens
        turns = lens // (self.interleave * self.count)
        rest = lens - turns * (self.interleave * self.count) - shard * self.interleave
        last = np.minimum(np.maximum(rest, 0), self.interleave)  # np.clip takes three times as long
        local: IntArray = turns * self.interleave + last
        return local.astype(np.int32, copy=False)

    def first_position(self, shard: int) -> int:
        """Return the first position that a shard keeps.

        The shard keeps no token of a request that ends before this position.
        """
        return shard * self.interleave

    def slots(self, block_table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slot of each position, in the cache of the shard that keeps the position.

        If the row has no block for a position, the slot is in the dummy block.

        Args:
            block_table: [max_rows, max_blocks]; block 0 is the dummy block.
            rows, positions: arrays of the same shape, or of shapes that can be broadcast.
        """
        places = self._places(positions)
        blocks, offsets = places // self.block_size, places % self.block_size
        last = block_table.shape[1] - 1
        if int(blocks.max(initial=0)) <= last:
            return (block_table[rows, blocks] * self.block_size + offsets).astype(
                np.int32, copy=False
            )
        ids = np.where(blocks <= last, block_table[rows, np.minimum(blocks, last)], 0)
        return (ids * self.block_size + offsets).astype(np.int32, copy=False)

    def slots_of(
        self, shard: int, block_table: IntArray, rows: IntArray, positions: IntArray
    ) -> IntArray:
        """Return the slots in which one shard writes; ``FOREIGN_SLOT`` for other shards' tokens."""
        slots = self.slots(block_table, rows, positions)
        if self.count == 1:
            return slots
        return np.where(self.owners(positions) == shard, slots, FOREIGN_SLOT).astype(np.int32)

    def _places(self, positions: IntArray) -> IntArray:
        """Return the index of each position among the tokens that its shard keeps."""
        if self.count == 1:
            return positions
        turn = self.interleave * self.count
        return positions // turn * self.interleave + positions % self.interleave
