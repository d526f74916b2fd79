"""Finds and allocates the KV blocks that decoding requests need for their next tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.scheduler.rows import Places, RunningRows


class Lack(NamedTuple):
    """The decoding requests that have too few blocks for their next tokens.

    Attributes:
        short: [n], indices of these requests.
        missing: [n], number of additional blocks that each of these requests needs.
    """

    short: Places
    missing: IntArray

    @property
    def num_blocks(self) -> int:
        return int(self.missing.sum())


NO_LACK = Lack(np.empty(0, np.intp), np.empty(0, np.int32))


def missing_blocks(rows: RunningRows, decode_len: int, block_size: int) -> Lack:
    """Return the decoding requests that have too few blocks.

    A request needs no block for drafts after its last possible token.

    Args:
        decode_len: number of tokens of a request that decodes: its last token and its drafts.
    """
    ends = np.minimum(rows.computed + rows.slack + decode_len, rows.limit - 1)
    is_short = ends > rows.covered
    if not is_short.any():
        return NO_LACK
    short = np.flatnonzero(is_short & rows.decodes)
    return Lack(short, -(-(ends[short] - rows.covered[short]) // block_size))


def give_blocks(rows: RunningRows, pool: BlockPool, lack: Lack) -> list[int]:
    """Allocate the blocks that ``lack`` describes. The pool must have enough free blocks.

    Returns:
        The allocated blocks, as flat records: row, index in the block table, block id.
    """
    short, missing = lack
    blocks: list[int] = []
    owners = map(rows.requests.__getitem__, np.repeat(short, missing).tolist())
    for request, block_id in zip(owners, pool.allocate(lack.num_blocks), strict=True):
        blocks += (request.row, len(request.block_ids), block_id)
        request.block_ids.append(block_id)
        if request.is_suspect:
            pool.clean_first([block_id])
    rows.covered[short] += missing * pool.block_size
    return blocks
