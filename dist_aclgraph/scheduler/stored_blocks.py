"""Adds full blocks to a prefix cache, and reports them as events. Only this module calls
``BlockPool.store``.
"""

from __future__ import annotations

from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.scheduler.request import Request


def store_block(pool: BlockPool, request: Request, index: int, block_id: int) -> None:
    """Add a full block of a request to the prefix cache.

    Blocks of requests with a salt are not reported as events, because these blocks are private.

    Args:
        index: index of the block in the request. The block's hash must be known.
    """
    hashes, events, size = request.hashes, pool.events, pool.block_size
    is_new = pool.store(block_id, hashes[index])
    if is_new and events is not None and not request.cache_root:
        tokens = request.tokens[index * size : (index + 1) * size]
        events.stored(hashes[index], hashes[index - 1] if index else b"", tokens)
