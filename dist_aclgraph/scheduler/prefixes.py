"""The prefixes that requests of one rank share. A prefix consists of full blocks and, for a model
with recurrent state, a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.block_pool import BlockPool, hash_block
from dist_aclgraph.scheduler.block_copies import BlockCopies
from dist_aclgraph.scheduler.rank_step import Chunk, Flight
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.rows import Indices, RunningRows
from dist_aclgraph.scheduler.stored_blocks import store_block


class Prefixes:
    """Finds and stores prefixes in the pool of a rank.

    The object owns nothing: the pool owns blocks and checkpoints, and a request owns its hashes.
    """

    def __init__(self, pool: BlockPool, copies: BlockCopies | None = None) -> None:
        self._pool = pool
        self._copies = copies

    def match(self, request: Request) -> list[int]:
        """Return the cached blocks of a waiting request's prefix. If the model has recurrent state,
        the last of these blocks ends at a checkpoint.

        The prefix never contains the request's last token. This token must be computed, because the
        next token is chosen from its logits.
        """
        if not self._may_share(request):
            return []
        count = (len(request.tokens) - 1) // self._pool.block_size
        self._hash_blocks(request, count)
        found = self._pool.match(request.hashes[:count])
        if self._pool.checkpoints is None:
            return found
        return found[: self._pool.checkpoints.longest(request.hashes[: len(found)])]

    def _may_share(self, request: Request) -> bool:
        """Return whether a request may start with blocks that another request has computed."""
        needs_logits = request.sampling.prompt_logprobs >= 0  # the cache stores no logits
        return self._pool.prefix_cache and not (request.is_suspect or needs_logits)

    def fetch(self, request: Request, shared: Sequence[int]) -> bool:
        """Look up the files of the blocks after ``shared``, and begin to read these files. Return
        whether the request must wait for the look-up or for the copy job.

        No copy job begins if no file is found, or if too few blocks are free to start the request.
        While a request waits, its files are looked up only once.
        """
        copies, pool = self._copies, self._pool
        # While there are dirty blocks, no copy job begins. The next step sets all dirty blocks to
        # zero. So a job must not read data into a dirty block.
        if copies is None or request.has_looked or pool.has_dirty or not self._may_share(request):
            return False
        missing = -(-len(request.tokens) // pool.block_size) - len(shared)
        if missing > pool.num_free_without(shared):
            return False
        if request.look_up is None:
            count = (len(request.tokens) - 1) // pool.block_size
            fetch, source = request.fetch, request.source
            request.fetch, request.source = None, None
            request.look_up = copies.find(request.hashes[:count], len(shared), fetch, source)
        if (end := request.look_up()) is None:
            return True
        request.look_up, request.has_looked = None, True
        wanted = request.hashes[len(shared) : end]
        return bool(wanted) and copies.load(request, shared, wanted)

    def checkpoint_after(self, request: Request, shared: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the checkpoint after the cached blocks ``shared``. The tuple is
        empty if ``shared`` is empty, or if the model has no recurrent state.
        """
        if self._pool.checkpoints is None or not shared:
            return ()
        return (self._pool.checkpoints.use(request.hashes[len(shared) - 1]),)

    def store_full_blocks(self, rows: RunningRows, indices: Indices) -> None:
        """Add the full blocks of a step's requests to the prefix cache."""
        size = self._pool.block_size
        computed = rows.computed[indices] - rows.flying[indices]
        is_full = computed >= rows.next_full[indices]
        if not is_full.any():
            return
        for index in np.arange(len(rows))[indices][is_full].tolist():
            rows.settle(index)
            request = rows.requests[index]
            # A request can end at one of the drafts that its step accepted. All later tokens are
            # dropped.
            num_kept = min(int(rows.computed[index] - rows.flying[index]), len(request.tokens))
            num_full = num_kept // size
            if self._pool.prefix_cache and not request.is_suspect:
                self._hash_blocks(request, num_full)
                for full in range(int(rows.next_full[index]) // size - 1, num_full):
                    store_block(self._pool, request, full, request.block_ids[full])
                    if self._copies is not None:
                        self._copies.note_stored(request, full)
            rows.next_full[index] = (num_full + 1) * size

    def begin_checkpoints(
        self, rows: RunningRows, chunks: Sequence[Chunk], flight: Flight
    ) -> bytes:
        """Choose a checkpoint for each prompt whose state must be copied at the end of its chunk.

        The chosen checkpoints are stored in ``flight``.

        Returns:
            The records for the field ``kept`` of ``RankBatch``.
        """
        checkpoints, first = self._pool.checkpoints, flight.step.num_decoding
        if checkpoints is None:
            return b""
        kept: list[tuple[int, bytes]] = []
        records: list[int] = []
        for index, chunk in enumerate(chunks):
            request = rows.requests[chunk.index]
            if not chunk.is_kept or chunk.stop < chunk.end or request.is_suspect:
                continue
            count = chunk.stop // self._pool.block_size
            self._hash_blocks(request, count)
            checkpoint = checkpoints.begin(request.hashes[count - 1])
            if checkpoint is not None:
                kept.append((first + index, request.hashes[count - 1]))
                records += (request.row, checkpoint)
        flight.kept = kept
        return pack_ints(records) if records else b""

    def end_checkpoints(self, flight: Flight) -> None:
        """Store the checkpoints that a step has written. Drop a checkpoint if its request was
        removed, or if its last block is not in the prefix cache.
        """
        checkpoints = self._pool.checkpoints
        for index, block_hash in flight.kept:
            assert checkpoints is not None
            if flight.places[index] >= 0 and self._pool.match([block_hash]):
                checkpoints.store(block_hash)
                if self._copies is not None:
                    self._copies.note_checkpoint(block_hash)
            else:
                checkpoints.drop(block_hash)

    def drop_checkpoints(self, flight: Flight) -> None:
        """Free the checkpoints of a step that is undone."""
        for _, block_hash in flight.kept:
            assert self._pool.checkpoints is not None
            self._pool.checkpoints.drop(block_hash)

    def _hash_blocks(self, request: Request, count: int) -> None:
        """Extend the request's hashes to ``count`` full blocks; each hash is computed only once."""
        size = self._pool.block_size
        hashes = request.hashes
        while len(hashes) < count:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else request.cache_root
            hashes.append(hash_block(parent, request.tokens[start : start + size].tobytes()))
