"""BlockCopies: which KV blocks of a rank are copied to files outside the device, and back.
If the model has recurrent state, checkpoints of states are copied, too.

A block may be written to a file once it is in the prefix cache, because nobody changes it then. A
block that is read from a file enters the prefix cache once all ranks have it. So a copy that fails
makes a shorter prefix and nothing else: the missing tokens are computed.

While a copy runs, it holds references to its blocks, so that nobody else gets them. A request whose
blocks are read has no row and waits; the other requests run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.stored_blocks import store_block
from dist_aclgraph.steps.copies import CopyJob

# Blocks are written in batches, because each batch costs the workers' hosts some launches. A
# smaller batch is written when no batch has begun for MAX_TURNS decisions.
BATCH_BLOCKS, MAX_TURNS = 8, 16
# Copies hold at most this part of the pool, so that requests find blocks.
MAX_HELD = 1 / 8
# Blocks that wait to be written; if there are more, the oldest ones are not written.
MAX_PENDING = 4096


HasFile = Callable[[BlockHash], bool]


@dataclass
class CopyCounts:
    """Counts of blocks since the start of an engine."""

    saved: int = 0
    unsaved: int = 0  # blocks for which there was no time or no room
    loaded: int = 0
    missed: int = 0  # blocks that were found, and could not be read


@dataclass
class _Copy:
    """A copy that runs.

    Attributes:
        held: the blocks that the copy holds, in table order.
        block_ids: the blocks that are copied.
        request: the request that waits for the blocks; None if blocks are written.
        waits_for: the ranks that have not answered.
        num_whole: the smallest number of first blocks that a rank has copied.
        states: hash and number of each checkpoint that is copied.
    """

    held: Sequence[int]
    block_ids: Sequence[int]
    hashes: Sequence[BlockHash]
    request: Request | None
    waits_for: set[int]
    states: Sequence[tuple[BlockHash, int]] = ()
    num_whole: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_whole = len(self.block_ids)


class BlockCopies:
    """The copies of one data-parallel rank's blocks.

    Args:
        has: whether there is a file of a block. The answer may be wrong.
        ranks: the ranks of the lockstep group that keep parts of the blocks.
        has_state: likewise, for the checkpoint after a block; None without recurrent state.
    """

    def __init__(
        self,
        pool: BlockPool,
        has: HasFile,
        ranks: Collection[int],
        has_state: HasFile | None = None,
    ) -> None:
        self._pool = pool
        self._has = has
        self._has_state = has_state
        self._pending_states: deque[BlockHash] = deque(maxlen=MAX_PENDING)
        self._ranks = frozenset(ranks)
        self._num_jobs = 0
        self._running: dict[int, _Copy] = {}
        self._pending: deque[tuple[int, BlockHash]] = deque()
        self._num_turns = 0  # decisions since a batch was last written
        self._new: list[CopyJob] = []
        self._unsaved: Counter[BlockHash] = Counter()  # blocks whose files are not complete
        self.counts = CopyCounts()

    @property
    def is_busy(self) -> bool:
        """Whether a copy runs or waits."""
        return bool(self._running or self._pending or self._pending_states)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _num_free(self) -> int:
        """Number of additional blocks that copies may hold."""
        held = sum(len(copy.held) for copy in self._running.values())
        return max(1, int(self._pool.num_usable * MAX_HELD)) - held

    # ---- from the device to files

    def note_stored(self, block_id: int, block_hash: BlockHash) -> None:
        """Write a block that has entered the prefix cache to a file, when there is time."""
        self._pending.append((block_id, block_hash))
        self._unsaved[block_hash] += 1
        if len(self._pending) > MAX_PENDING:
            self._settle([self._pending.popleft()[1]])
            self.counts.unsaved += 1

    def note_checkpoint(self, block_hash: BlockHash) -> None:
        """Write a stored checkpoint to a file, when there is time."""
        self._pending_states.append(block_hash)

    def have_ended(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether no block of these is still to be written to a file."""
        return self._unsaved.keys().isdisjoint(hashes)

    def stop_waiting(self) -> None:
        """From now on, nobody waits for the blocks that are not written yet."""
        self._unsaved.clear()

    def _settle(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self._unsaved[block_hash] -= 1
            if self._unsaved[block_hash] <= 0:
                del self._unsaved[block_hash]

    def _save(self) -> None:
        """Begin to write the pending blocks that are still in the prefix cache."""
        self._num_turns = 0
        block_ids: list[int] = []
        hashes: list[BlockHash] = []
        room = self._num_free
        while self._pending and len(block_ids) < room:
            block_id, block_hash = self._pending.popleft()
            if self._pool.hash_of(block_id) == block_hash and not self._has(block_hash):
                block_ids.append(block_id)
                hashes.append(block_hash)
            else:  # the block was given to another request, or another group has written the file
                self._settle([block_hash])
        states = self._hold_states()
        if block_ids or states:
            self._pool.share(block_ids)
            self._begin(block_ids, block_ids, hashes, None, states)

    def _hold_states(self) -> list[tuple[BlockHash, int]]:
        """Return the pending checkpoints that still exist, and hold them."""
        checkpoints = self._pool.checkpoints
        states = []
        while self._pending_states:
            assert checkpoints is not None and self._has_state is not None
            block_hash = self._pending_states.popleft()
            if not self._has_state(block_hash):
                checkpoint = checkpoints.hold(block_hash)
                if checkpoint is not None:
                    states.append((block_hash, checkpoint))
        return states

    # ---- from files to the device

    def find(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first blocks have files.

        As files of later blocks are deleted first, a binary search is enough. If the answer is too
        large, the missing blocks are noticed when they are read.
        """
        count = bisect_left(range(len(hashes)), True, key=lambda i: not self._has(hashes[i]))
        if self._has_state is None:
            return count
        ends = (n for n in range(count, 0, -1) if self._has_state(hashes[n - 1]))
        return next(ends, 0)

    def load(self, request: Request, shared: Sequence[int], hashes: Sequence[BlockHash]) -> bool:
        """Begin to read the blocks that follow the cached blocks ``shared`` of a request, and the
        checkpoint after them; return False if no checkpoint is free.
        """
        states: list[tuple[BlockHash, int]] = []
        if self._pool.checkpoints is not None:
            checkpoint = self._pool.checkpoints.begin(hashes[-1])
            if checkpoint is None:
                return False
            states.append((hashes[-1], checkpoint))
        self._pool.share(shared)
        block_ids = self._pool.allocate(len(hashes))
        self._begin([*shared, *block_ids], block_ids, hashes, request, states)
        return True

    # ---- both

    def take_jobs(self, *, is_idle: bool) -> tuple[CopyJob, ...]:
        """Return the copies that workers must begin now.

        Args:
            is_idle: whether no step runs, so that small batches do not delay anything.
        """
        self._num_turns += 1
        num_pending = len(self._pending) + len(self._pending_states)
        is_due = is_idle or num_pending >= BATCH_BLOCKS or self._num_turns >= MAX_TURNS
        if num_pending and is_due:
            self._save()
        jobs, self._new = tuple(self._new), []
        return jobs

    def _begin(
        self,
        held: Sequence[int],
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        request: Request | None,
        states: Sequence[tuple[BlockHash, int]],
    ) -> None:
        number = self._num_jobs
        self._num_jobs += 1
        ranks = set(self._ranks)
        self._running[number] = _Copy(held, block_ids, hashes, request, ranks, states)
        self._new.append(
            CopyJob(
                number,
                request is not None,
                pack_ints(block_ids),
                b"".join(hashes),
                pack_ints([checkpoint for _, checkpoint in states]),
                b"".join(block_hash for block_hash, _ in states),
            )
        )

    def end(self, number: int, rank: int, num_whole: int) -> Request | None:
        """Note a rank's end of a copy; return the request that waited for it, after the last rank.

        Args:
            num_whole: number of first blocks that were copied.
        """
        copy = self._running.get(number)
        if copy is None or rank not in copy.waits_for:
            return None
        copy.waits_for.remove(rank)
        copy.num_whole = min(copy.num_whole, num_whole)
        if copy.waits_for:
            return None
        del self._running[number]
        count, total = copy.num_whole, len(copy.block_ids)
        if copy.request is None:
            self._settle(copy.hashes)
            self.counts.saved += count
            self.counts.unsaved += total - count
        else:
            self.counts.loaded += count
            self.counts.missed += total - count
            first = len(copy.held) - total
            for index, block_id in enumerate(copy.block_ids[:count], first):
                store_block(self._pool, copy.request, index, block_id)
        self._end_states(copy, is_whole=count == total)
        self._pool.free(copy.held)
        return copy.request

    def _end_states(self, copy: _Copy, *, is_whole: bool) -> None:
        """Release the checkpoints that were written to files; store or drop the ones that were
        read.
        """
        checkpoints = self._pool.checkpoints
        for block_hash, checkpoint in copy.states:
            assert checkpoints is not None
            if copy.request is None:
                checkpoints.release(checkpoint)
            elif is_whole:
                checkpoints.store(block_hash)
            else:
                checkpoints.drop(block_hash)

    def forget(self) -> list[Request]:
        """End all copies, because workers have forgotten them; return the requests that waited.

        Must be called before the pool forgets its blocks.
        """
        requests = [copy.request for copy in self._running.values() if copy.request is not None]
        for copy in self._running.values():
            self._end_states(copy, is_whole=False)
            self._pool.free(copy.held)
        self._running.clear()
        self._pending_states.clear()
        self._pending.clear()
        self._unsaved.clear()
        self._new.clear()
        return requests
