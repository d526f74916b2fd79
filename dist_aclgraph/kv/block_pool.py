"""BlockPool: records which KV blocks are used, which are free, and which blocks are in the prefix
cache.

A full block is identified by a hash of its tokens and of all tokens before it, so prompts with
equal beginnings share blocks. Every operation takes O(1) time per block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dist_aclgraph.errors import KVCacheError, OutOfBlocksError
from dist_aclgraph.kv.checkpoints import BlockHash, Checkpoints
from dist_aclgraph.kv.events import CacheEvents

DUMMY_BLOCK = 0  # Padding uses this block; no request owns it.
HASH_BYTES = 16


def salted_root(salt: str) -> BlockHash:
    """Return the argument ``parent`` of ``hash_block`` for the first block of a request with this
    salt; b"" if ``salt`` is empty.
    """
    if not salt:
        return b""
    return hashlib.blake2b(salt.encode(), person=b"salt", digest_size=HASH_BYTES).digest()


def hash_block(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of a full block.

    Args:
        parent: hash of the previous block; for the first block, the result of ``salted_root``.
        tokens: int32 [block_size].
    """
    return hashlib.blake2b(tokens, key=parent, digest_size=HASH_BYTES).digest()


class BlockPool:
    """Owns block ids and reference counts. Knows nothing about requests or devices.

    Invariant: every block except the dummy block is either used (reference count > 0) or free, and
    ``num_free + num_used == num_blocks - 1``.

    Args:
        counts_shared: whether a shared block counts once for each request that uses the block. CANN
            8.5 requires this: its attention operator counts a shared block once for each request,
            and refuses a batch if the sum exceeds the cache's number of blocks.
        checkpoints: the checkpoints of a model with recurrent state; None for other models. A
            checkpoint is freed when the block directly before the checkpoint is evicted from the
            prefix cache.
        events: receives the events of the prefix cache; None if events are not published. The pool
            reports evicted blocks; ``store_block``, which knows the tokens, reports stored blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        counts_shared: bool = False,
        checkpoints: Checkpoints | None = None,
        events: CacheEvents | None = None,
    ) -> None:
        if num_blocks < 2:
            raise KVCacheError(f"num_blocks is {num_blocks}; at least 2 are needed, one as a dummy")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.counts_shared = counts_shared
        self.checkpoints = checkpoints
        self.events = events
        self.clear()

    @property
    def num_usable(self) -> int:
        """Number of blocks that requests can use."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now.

        With ``counts_shared``, this number can be smaller than the number of blocks without a
        reference.
        """
        if self.counts_shared:
            return self.num_usable - self._num_references
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks in the prefix cache, used or free. ``match`` can return these blocks."""
        return len(self._by_hash)

    def clear(self) -> None:
        """Free all blocks and empty the prefix cache, for example after the KV was lost."""
        self._ref_counts = [0] * self.num_blocks
        self._num_references = 0
        # The smallest ids are allocated first, so that traces are easy to read.
        self._blank = list(range(self.num_blocks - 1, DUMMY_BLOCK, -1))
        # Blocks that are free and cached, in the order in which they were freed.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[BlockHash | None] = [None] * self.num_blocks
        self._by_hash: dict[BlockHash, int] = {}
        self._condemned: set[int] = set()  # used blocks that might contain NaN
        self._dirty: list[int] = []  # blocks that must be cleaned before the next step
        if self.checkpoints is not None:
            self.checkpoints.clear()
        if self.events is not None:
            self.events.cleared()

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free blocks, and add one reference to each block.

        Free blocks that are not in the prefix cache are allocated first. Then free blocks of the
        prefix cache are allocated, in the order in which they were freed.

        Raises:
            OutOfBlocksError: fewer than ``count`` blocks are free; no block was allocated.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free} are free")
        self._num_references += count
        block_ids = []
        for _ in range(count):
            if self._blank:
                block_id = self._blank.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks with these ``hashes``, in order. Stop at the first hash whose block is
        not in the prefix cache. No references are added.
        """
        block_ids: list[int] = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """Return the number of free blocks that would remain after ``share(block_ids)``."""
        if self.counts_shared:
            return self.num_free - len(block_ids)
        return self.num_free - sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block. Each block must be used or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._cached:
                    raise KVCacheError(f"block {block_id} is blank; only cached blocks are shared")
                del self._cached[block_id]
            self._ref_counts[block_id] += 1
            self._num_references += 1

    def store(self, block_id: int, block_hash: BlockHash) -> bool:
        """Add a used, full block to the prefix cache, so that ``match`` finds it. After this call,
        the block must not be written.

        Returns:
            True if the block was added. False if another block already has this hash; in this case,
            nothing changes.
        """
        if self._ref_counts[block_id] == 0:
            raise KVCacheError(f"block {block_id} is free; only used blocks are stored")
        if not self.prefix_cache or self._hashes[block_id] is not None:
            return False
        if self._by_hash.setdefault(block_hash, block_id) != block_id:
            return False
        self._hashes[block_id] = block_hash
        return True

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one reference from each block of a request. ``block_ids`` must be in the order of
        the request's block table.

        The request's last blocks are evicted before its first blocks, because ``match`` cannot find
        a block if a block before it was evicted.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            if count < 1:
                raise KVCacheError(f"block {block_id} is not used; it cannot be freed")
            self._ref_counts[block_id] = count - 1
            self._num_references -= 1
            if count == 1:
                if block_id in self._condemned:
                    self._condemned.remove(block_id)
                    self._dirty.append(block_id)
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def condemn(self, block_ids: Iterable[int]) -> None:
        """Record that used blocks might contain NaN. After this call, ``match`` does not return
        these blocks. After a block is freed, workers clean it (set it to zero).
        """
        for block_id in block_ids:
            self._forget(block_id)
            self._condemned.add(block_id)

    def take_dirty(self) -> list[int]:
        """Return the blocks that workers must clean (set to zero) before the next step. Each block
        is returned only once.

        A result that is not empty includes the dummy block, because the KV of tokens after a
        request's end is written to the dummy block.
        """
        if not self._dirty:
            return []
        dirty, self._dirty = [DUMMY_BLOCK, *self._dirty], []
        return dirty

    def clean_first(self, block_ids: Iterable[int]) -> None:
        """Let workers clean these blocks (set them to zero) before the next step. The blocks may be
        used or free.
        """
        self._dirty += [block_id for block_id in block_ids if block_id != DUMMY_BLOCK]

    def hash_of(self, block_id: int) -> BlockHash | None:
        """Return the hash of a block; None if ``match`` cannot find the block. A block with a hash
        must not be written.
        """
        return self._hashes[block_id]

    @property
    def has_dirty(self) -> bool:
        """Whether blocks must be cleaned before the next step."""
        return bool(self._dirty)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
            if self.checkpoints is not None:
                self.checkpoints.forget(block_hash)
            if self.events is not None:
                self.events.removed(block_hash)
