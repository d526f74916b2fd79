"""Computes which shard of a request's KV cache keeps a token, and the token's slot on this shard.

The first ``interleave`` tokens belong to shard 0, the next ``interleave`` tokens belong to shard 1,
and so on. After the last shard, shard 0 follows again. Every shard has one block for each block id.
The blocks of all shards with one id contain ``tokens_per_block`` neighbouring tokens together.
vLLM's decode context parallelism uses the same layout.

If a cache is not divided, each rank has a whole copy of it. Such a cache uses the same block ids,
and each of its blocks contains ``tokens_per_block`` tokens. A token's slot in such a cache is its
*whole slot*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import Config

PADDING_SLOT = -1  # slot of a padding token: its KV is not written, and no expert runs the token
# If a shard does not keep a token, the token's slot on this shard is FOREIGN_SLOT - s. Here, s is
# the token's slot in an undivided cache (whole slot).
FOREIGN_SLOT = -2

Ints = TypeVar("Ints", bound=Any)  # an array on the host, or a tensor on the device


@dataclass(frozen=True)
class Shards:
    """How caches are divided between shards.

    Attributes:
        block_size: number of tokens of a block on one shard.
        count: number of shards; if it is 1, caches are not divided.
        interleave: number of neighbouring tokens that one shard keeps before the next shard
            follows. ``block_size`` must be a multiple of this number.
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
        """Number of tokens that all blocks with the same id contain together; each shard has one of
        these blocks.
        """
        return self.block_size * self.count

    def owners(self, at: Ints) -> Ints:
        """Return which shard keeps each token.

        Args:
            at: positions of the tokens in their request, or the tokens' slots in an undivided
                cache.
        """
        found: Ints = (at if self.interleave == 1 else at // self.interleave) % self.count
        return found

    def lengths(self, lens: IntArray, shard: int) -> IntArray:
        """Return the number of tokens that one shard keeps, for requests with ``lens`` tokens."""
        if self.count == 1:
            return lens
        turns = lens // (self.interleave * self.count)
        rest = lens - turns * (self.interleave * self.count) - shard * self.interleave
        last = np.minimum(np.maximum(rest, 0), self.interleave)  # three times as fast as np.clip
        local: IntArray = turns * self.interleave + last
        return local.astype(np.int32, copy=False)

    def first_position(self, shard: int) -> int:
        """Return the position of the first token that a shard keeps. This position is the same for
        all requests.

        If a request ends before this position, the shard keeps no token of the request.
        """
        return shard * self.interleave

    def slots(self, block_table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slot of each position, in the cache of the shard that keeps the position.

        If a request's row has no block for a position, the slot is in the dummy block.

        Args:
            block_table: [max_rows, max_blocks]; block 0 is the dummy block.
            rows, positions: arrays of the same shape, or of shapes that can be broadcast.
        """
        return self.own_slots(self.whole_slots(block_table, rows, positions))

    def slots_of(
        self, shard: int, block_table: IntArray, rows: IntArray, positions: IntArray
    ) -> IntArray:
        """Return the slots to which one shard writes. For a token of another shard, the result is a
        negative number; see ``FOREIGN_SLOT``.
        """
        whole = self.whole_slots(block_table, rows, positions)
        if self.count == 1:
            return whole
        is_own = self.owners(whole) == shard
        return np.where(is_own, self.own_slots(whole), FOREIGN_SLOT - whole).astype(np.int32)

    def whole_slots(self, block_table: IntArray, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the slot of each position in an undivided cache; see ``slots`` for arguments."""
        size = self.tokens_per_block
        blocks, offsets = positions // size, positions % size
        last = block_table.shape[1] - 1
        if int(blocks.max(initial=0)) <= last:
            ids = block_table[rows, blocks]
        else:
            ids = np.where(blocks <= last, block_table[rows, np.minimum(blocks, last)], 0)
        return (ids * size + offsets).astype(np.int32, copy=False)

    def own_slots(self, whole: Ints) -> Ints:
        """Convert slots in an undivided cache to the slots on the shards that keep the tokens."""
        if self.count == 1:
            return whole
        own: Ints = whole // (self.interleave * self.count)
        if self.interleave > 1:
            own = own * self.interleave + whole % self.interleave
        return own

    def whole_of(self, own: Ints, shard: int) -> Ints:
        """Convert slots of one shard to the tokens' slots in an undivided cache."""
        turns = own // self.interleave * self.count + shard
        whole: Ints = turns * self.interleave + own % self.interleave
        return whole
