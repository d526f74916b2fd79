"""The shard of a request's KV cache that keeps a token, and the token's slot there.

Tokens go to shards by turns, ``interleave`` at a time. A block id names one block on every shard;
together these blocks hold ``tokens_per_block`` neighbouring tokens. The layout is that of vLLM's
decode context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dist_aclgraph.config import Config
from dist_aclgraph.ints import IntArray

PADDING_SLOT = -1  # slot of padding: never written, and the token runs no expert
FOREIGN_SLOT = -2  # slot of a token that another shard keeps


@dataclass(frozen=True)
class Shards:
    """How caches are divided between shards.

    Attributes:
        block_size: tokens of a block on one shard.
        count: number of shards; with 1, one shard keeps everything.
        interleave: neighbouring tokens of one turn; divides ``block_size``.
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
        """Tokens of a request that one block id holds on all shards together."""
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
        """Return the first position that a shard keeps; a shorter request has nothing there."""
        return shard * self.interleave

    def slots(self, block_table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slot of each position in the cache of its owner.

        If the row has no block there, the slot is in the dummy block.

        Args:
            block_table: [max_rows, max_blocks]; block 0 is the dummy.
            rows, positions: of one shape, or broadcastable.
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
        """Return the slots that one shard writes: ``FOREIGN_SLOT`` for tokens of other shards."""
        slots = self.slots(block_table, rows, positions)
        if self.count == 1:
            return slots
        return np.where(self.owners(positions) == shard, slots, FOREIGN_SLOT).astype(np.int32)

    def _places(self, positions: IntArray) -> IntArray:
        """Return the index of each position among the tokens of its owner."""
        if self.count == 1:
            return positions
        turn = self.interleave * self.count
        return positions // turn * self.interleave + positions % self.interleave
