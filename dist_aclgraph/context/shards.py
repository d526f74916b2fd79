"""Which shard of a request's KV cache keeps which token, and where.

Tokens go to shards by turns, ``interleave`` at a time. A block id names one block on every shard;
together these hold ``tokens_per_block`` neighbouring tokens. Reference: decode context parallelism
of vLLM, whose layout this is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dist_aclgraph.config import Config
from dist_aclgraph.ints import IntArray

PADDING_SLOT = -1  # of padding: written nowhere, and runs no expert
FOREIGN_SLOT = -2  # of a token that another shard keeps


@dataclass(frozen=True)
class Shards:
    """How caches are divided.

    Attributes:
        block_size: tokens of a block on one shard.
        count: shards; 1 keeps everything.
        interleave: tokens of one turn; divides ``block_size``.
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
        """Tokens of a request that all shards keep in one block id."""
        return self.block_size * self.count

    def owners(self, positions: IntArray) -> IntArray:
        """Return which shard keeps the token at each position."""
        return positions // self.interleave % self.count

    def lengths(self, lens: IntArray, shard: int) -> IntArray:
        """Return how many of the first ``lens`` tokens of requests one shard keeps."""
        if self.count == 1:
            return lens
        turns = lens // (self.interleave * self.count)
        rest = lens - turns * (self.interleave * self.count) - shard * self.interleave
        last = np.minimum(np.maximum(rest, 0), self.interleave)  # clip takes three times as long
        local: IntArray = turns * self.interleave + last
        return local.astype(np.int32, copy=False)

    def first_position(self, shard: int) -> int:
        """Return the first position that a shard keeps: shorter requests have nothing there."""
        return shard * self.interleave

    def slots(self, block_table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return where the owner of each position keeps its KV.

        That is in the dummy block where the row has no other.

        Args:
            block_table: [max_rows, max_blocks]; block 0 is the dummy.
            rows, positions: of one shape, or such that can be broadcast.
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
        """Return what one shard writes: the slots of its own tokens, ``FOREIGN_SLOT`` of others."""
        slots = self.slots(block_table, rows, positions)
        if self.count == 1:
            return slots
        return np.where(self.owners(positions) == shard, slots, FOREIGN_SLOT).astype(np.int32)

    def _places(self, positions: IntArray) -> IntArray:
        """Return the index of each position among the tokens that its owner keeps."""
        if self.count == 1:
            return positions
        turn = self.interleave * self.count
        return positions // turn * self.interleave + positions % self.interleave
