"""BlockCopies: decides which KV blocks of a rank are written to files and read from files.
If the model has recurrent state, checkpoints of states are also copied.

A block may be written to a file when it is in the prefix cache, because cached blocks do not
change. A block that was read from a file enters the prefix cache when all workers have read it. A
failed copy job has only one effect: the cached prefix is shorter, so more tokens are computed.

A running copy job holds references to its blocks. The pool does not allocate referenced blocks.
While a request's blocks are read, the request waits, and has no row in the batch. The other
requests run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import (
    Answer,
    Existing,
    FetchBlocks,
    LookUps,
    Source,
    count_found,
    find_existing,
    find_or_fetch,
)
from dist_aclgraph.scheduler.file_upkeep import FileUpkeep
from dist_aclgraph.scheduler.node_look_ups import NodeLookUps, smallest
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.running_copy import RunningCopy
from dist_aclgraph.scheduler.stored_blocks import store_block
from dist_aclgraph.steps.copies import CopyJob, JobKind

# A batch of at least BATCH_BLOCKS blocks is written without delay. Each batch costs some launches
# on the workers' hosts, so a smaller batch waits until no step runs, or until MAX_TURNS steps were
# decided since the last batch.
BATCH_BLOCKS, MAX_TURNS = 8, 16
# Blocks are copied to files only while copy jobs hold less than this fraction of the pool, so that
# enough blocks are free for requests.
MAX_HELD = 1 / 8
# While jobs read files into this fraction of the pool's blocks, no other job begins to read.
# Without this limit, jobs that wait for a broken disk could occupy the whole pool.
MAX_LOADING = 1 / 4
# Maximum time in seconds that a request waits while other jobs read. With a slow disk, a longer
# wait might take more time than the computation of the prompt.
WAIT_S = 5.0
# Maximum number of blocks that wait to be written; if there are more, the oldest blocks are not
# written.
MAX_PENDING = 4096


@dataclass
class CopyCounts:
    """Numbers of blocks that jobs have copied, or could not copy, since the engine started."""

    saved: int = 0
    # blocks that were not written, because too many blocks waited, or a worker could not write them
    unsaved: int = 0
    loaded: int = 0
    missed: int = 0  # blocks whose files were found, but could not be read


class BlockCopies:
    """Owns the copy jobs of one data-parallel rank.

    Args:
        look_ups: looks up the files of blocks and checkpoints on the engine's node.
        ranks: the workers of this data-parallel rank, as indices in the lockstep group.
        elsewhere: looks up files on other nodes; None if all workers are on the engine's node.
    """

    def __init__(
        self,
        pool: BlockPool,
        look_ups: LookUps,
        ranks: Collection[int],
        elsewhere: NodeLookUps | None = None,
    ) -> None:
        self._pool = pool
        self._look_ups = look_ups
        # ``_existing`` is the look-up that runs for the files of waiting blocks and checkpoints, or
        # None. ``_num_asked`` is the number of blocks in this look-up.
        self._existing: Answer[Existing] | None = None
        self._num_asked = 0
        self._pending_states: deque[BlockHash] = deque(maxlen=MAX_PENDING)
        self._ranks = frozenset(ranks)
        self.elsewhere = NodeLookUps() if elsewhere is None else elsewhere
        self._num_jobs = 0
        # Number of jobs that all workers have ended. A look-up on other nodes also counts as a job.
        self.num_ended = 0
        self._running: dict[int, RunningCopy] = {}
        # The waiting blocks: id, hash, and number of blocks before the block in its prompt.
        self._pending: deque[tuple[int, BlockHash, int]] = deque()
        self._num_turns = 0  # number of calls of ``take_jobs`` since the last batch began
        self._new: list[CopyJob] = []
        # Blocks and states that a rank could not read, the oldest first. After a missed block or
        # state was computed again, a job writes it again, even if some ranks still have its file.
        self._missed: dict[BlockHash, None] = {}
        self._missed_states: dict[BlockHash, None] = {}
        self._upkeep = FileUpkeep()
        # For each block, the number of its writes that wait or run.
        self._unsaved: Counter[BlockHash] = Counter()
        self._is_late = False  # whether the copy jobs take too long; see ``note_late``
        self._num_loading = 0  # number of blocks that running jobs read from files
        self.counts = CopyCounts()

    @property
    def is_busy(self) -> bool:
        """Whether a copy job runs, or blocks wait to be written, or files wait to be deleted."""
        waits = self._pending or self._pending_states or self._upkeep.has_condemned
        return bool(self._running or waits)

    @property
    def num_running(self) -> int:
        """Number of running copy jobs and of running look-ups on other nodes, together."""
        return len(self._running) + self.elsewhere.num_running

    @property
    def _may_load(self) -> bool:
        """False if a request with files must wait, because too many blocks are being read."""
        limit = self._pool.num_usable * MAX_LOADING
        return self._is_late or not self._num_loading or self._num_loading < limit

    @property
    def _readers(self) -> list[Request]:
        """The requests for which copy jobs read blocks."""
        return [copy.request for copy in self._running.values() if copy.request is not None]

    @property
    def is_looking(self) -> bool:
        """Whether a look-up is running that finds out which waiting blocks have files."""
        return self._existing is not None

    @property
    def _num_free(self) -> int:
        """Number of further blocks to which copy jobs may hold references."""
        held = sum(len(copy.held) for copy in self._running.values())
        limit = int(self._pool.num_usable * MAX_HELD)
        if self._pool.counts_shared:  # a shared block counts once for each reference
            limit = min(limit, held + self._pool.num_free)
        return max(1, limit) - held

    # ---- from the device to files

    def note_stored(self, request: Request, index: int) -> None:
        """Add a request's block to the blocks that wait to be written to files, because the block
        has entered the prefix cache.
        """
        block_hash = request.hashes[index]
        self._pending.append((request.block_ids[index], block_hash, index))
        self._unsaved[block_hash] += 1
        if len(self._pending) > MAX_PENDING:
            self._settle([self._pending.popleft()[1]])
            self.counts.unsaved += 1

    def note_checkpoint(self, block_hash: BlockHash) -> None:
        """Add a stored checkpoint to the checkpoints that wait to be written to files."""
        self._pending_states.append(block_hash)

    def have_ended(self, hashes: Sequence[BlockHash]) -> bool:
        """Return True if no block with one of these hashes waits to be written or is being written.
        If copy jobs take too long, return True in any case.
        """
        return self._is_late or self._unsaved.keys().isdisjoint(hashes)

    def note_late(self) -> list[Request]:
        """Record that the copy jobs are late, for example because a worker's file thread waits for
        a disk that does not answer.

        Until the next job ends, no request waits for copies, or for look-ups on other nodes.

        Returns:
            The requests for which jobs read blocks.
        """
        self._is_late = True
        self.elsewhere.forget()
        return self._readers

    def _settle(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self._unsaved[block_hash] -= 1
            if self._unsaved[block_hash] <= 0:
                del self._unsaved[block_hash]

    def _save(self) -> None:
        """Begin to write the waiting blocks that are still in the prefix cache and have no file.

        The files are looked up first. If the look-up does not end at once, a later call begins to
        write. While copy jobs may hold no further blocks, only checkpoints are written.
        """
        if self._existing is None:
            first = islice(self._pending, max(0, self._num_free))
            names = [block_hash for _, block_hash, _ in first]
            if not (names or self._pending_states):
                return
            look_up = partial(find_existing, names, tuple(self._pending_states))
            self._existing, self._num_asked = self._look_ups.ask(look_up), len(names)
        if (existing := self._existing()) is None:
            return
        self._existing = None
        self._num_turns = 0
        block_ids: list[int] = []
        hashes: list[BlockHash] = []
        depths: list[int] = []
        # During the look-up, some of the looked-up blocks may have left ``_pending``. Then this
        # loop also takes blocks that were not looked up. Workers skip blocks that have files.
        for _ in range(min(self._num_asked, self._num_free, len(self._pending))):
            block_id, block_hash, depth = self._pending.popleft()
            has_file = block_hash in existing.blocks and block_hash not in self._missed
            if self._pool.hash_of(block_id) == block_hash and not has_file:
                self._missed.pop(block_hash, None)
                block_ids.append(block_id)
                hashes.append(block_hash)
                depths.append(depth)
            else:  # the block has left the prefix cache, or its file exists
                self._settle([block_hash])
        states = self._hold_states(existing.states)
        if block_ids or states:
            self._pool.share(block_ids)
            self._begin("save", hashes, depths, block_ids, block_ids, states=states)

    def _hold_states(self, existing: Collection[BlockHash]) -> list[tuple[BlockHash, int]]:
        """Pin and return the waiting checkpoints that are still stored and have no file."""
        checkpoints = self._pool.checkpoints
        states = []
        while self._pending_states:
            assert checkpoints is not None
            block_hash = self._pending_states.popleft()
            has_file = block_hash in existing and block_hash not in self._missed_states
            if not has_file:
                self._missed_states.pop(block_hash, None)
                checkpoint = checkpoints.hold(block_hash)
                if checkpoint is not None:
                    states.append((block_hash, checkpoint))
        return states

    # ---- from files to the device

    def find(
        self,
        hashes: Sequence[BlockHash],
        first: int = 0,
        fetch: FetchBlocks | None = None,
        source: Source | None = None,
    ) -> Answer[int]:
        """Begin to look up how many leading blocks a request need not compute: the ``first`` cached
        blocks, and the following blocks that have files. With recurrent state, the last block must
        have a checkpoint with a file. The returned function returns None while the look-up runs.
        After that, if too many blocks are being read from files, the function returns None for
        ``WAIT_S`` seconds, and then ``first``.

        Args:
            fetch: fetches the missing files to the engine's node. Then the files are looked up
                again.
            source: the group from which the other nodes fetch missing files.
        """
        wanted, asks_others = hashes[first:], self.elsewhere.must_ask(source)
        # No block remains to look up, or other nodes would be asked although copy jobs are late.
        if not wanted or (asks_others and self._is_late):
            return lambda: first
        answers: list[Answer[int]] = []
        if not (asks_others and self.elsewhere.covers_engine):
            is_refused = self._upkeep.is_condemned
            ask = partial(
                self._look_ups.ask, lambda files: first + count_found(wanted, files, is_refused)
            )
            answers.append(ask() if fetch is None else find_or_fetch(ask, fetch, hashes))
        if asks_others:
            job, answer = self.elsewhere.begin(self._next_number(), wanted, first, source)
            self._new.append(job)
            answers.append(answer)
        # Before each step, ``answer_once`` is called again for every waiting request. To save time,
        # ``found`` stores the result of the look-ups.
        found: int | None = None
        end_s = 0.0

        def answer_once() -> int | None:
            nonlocal found, end_s
            if found is None and (found := smallest(answers)) is not None:
                end_s = self._look_ups.clock() + WAIT_S
            if found in (None, first) or self._may_load:
                return found
            return first if self._look_ups.clock() > end_s else None

        return answer_once

    def condemn(self, hashes: Sequence[BlockHash]) -> None:
        """Mark the files of these blocks for deletion, because the blocks might contain NaN. Until
        the files are deleted, no request begins to read these files, and blocks that are being read
        do not enter the prefix cache.
        """
        self._upkeep.condemn(hashes)

    def load(self, request: Request, shared: Sequence[int], hashes: Sequence[BlockHash]) -> bool:
        """Begin to read the blocks that follow a request's cached blocks ``shared``, and the
        checkpoint after the last block.

        Returns False if jobs take too long, no checkpoint is free, or a file will be deleted.
        """
        if self._is_late or any(map(self._upkeep.is_condemned, hashes)):
            return False
        states: list[tuple[BlockHash, int]] = []
        if self._pool.checkpoints is not None:
            checkpoint = self._pool.checkpoints.begin(hashes[-1])
            if checkpoint is None:
                return False
            states.append((hashes[-1], checkpoint))
        self._pool.share(shared)
        block_ids = self._pool.allocate(len(hashes))
        held = [*shared, *block_ids]
        self._num_loading += len(hashes)
        self._begin("load", hashes, range(len(shared), len(held)), held, block_ids, request, states)
        return True

    # ---- jobs that use only files

    def _delete_condemned(self) -> None:
        """Begin to delete files that ``condemn`` has marked, except of blocks being copied."""
        copied = (copy for copy in self._running.values() if copy.kind in ("save", "load"))
        hashes = self._upkeep.take_condemned({each for copy in copied for each in copy.hashes})
        if hashes:
            states = hashes if self._look_ups.has_states else ()
            self._begin("delete", hashes, [0] * len(hashes), state_hashes=states)

    def note_used(self, hashes: Sequence[BlockHash]) -> None:
        """Record that a request starts with cached blocks, whose hashes are ``hashes``."""
        self._upkeep.note_used(hashes, hashes[-1] if self._look_ups.has_states else None)

    def _touch_used(self) -> None:
        """Begin a job that touches the files of cached blocks in use (``FileUpkeep``)."""
        used, states = self._upkeep.take_used()
        if used:
            self._begin("touch", list(used), list(used.values()), state_hashes=states)

    # ---- all jobs

    def take_jobs(self, *, is_idle: bool, may_touch: bool = False) -> tuple[CopyJob, ...]:
        """Return the copy jobs that workers must begin now.

        Args:
            is_idle: whether no step runs. If true, even small batches are written without delay,
                because their launches delay no step.
            may_touch: whether jobs may update the times of last use of cached blocks' files. The
                caller must set this to true only rarely.
        """
        self._num_turns += 1
        num_pending = len(self._pending) + len(self._pending_states)
        is_due = is_idle or num_pending >= BATCH_BLOCKS or self._num_turns >= MAX_TURNS
        if num_pending and is_due:
            self._save()
        if self._upkeep.has_condemned:
            self._delete_condemned()
        if may_touch and all(copy.kind != "touch" for copy in self._running.values()):
            self._touch_used()
        jobs, self._new = (*self._new, *self.elsewhere.take_cancelled()), []
        return jobs

    def _begin(
        self,
        kind: JobKind,
        hashes: Sequence[BlockHash],
        depths: Sequence[int],
        held: Sequence[int] = (),
        block_ids: Sequence[int] = (),
        request: Request | None = None,
        states: Sequence[tuple[BlockHash, int]] = (),
        state_hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Begin a job.

        Args:
            states: for each checkpoint that the job copies, its block's hash, and its number.
            state_hashes: hashes of checkpoints whose files the job touches or deletes.
        """
        number = self._next_number()
        ranks = set(self._ranks)
        self._running[number] = RunningCopy(kind, held, block_ids, hashes, request, ranks, states)
        self._new.append(
            CopyJob(
                number,
                kind,
                pack_ints(block_ids),
                b"".join(hashes),
                pack_ints(depths),
                pack_ints([checkpoint for _, checkpoint in states]),
                b"".join(state_hashes or (block_hash for block_hash, _ in states)),
            )
        )

    def _next_number(self) -> int:
        self._num_jobs += 1
        return self._num_jobs - 1

    def end(self, number: int, rank: int, num_whole: int) -> Request | None:
        """Record that a worker has ended a copy job. If all workers have ended the job, return the
        request that waited for this job, otherwise None.

        Args:
            num_whole: number of blocks that the worker has written, or number of leading blocks
                that the worker has read or found.
        """
        if self.elsewhere.end(number, rank, num_whole):
            self._note_end()
        copy = self._running.get(number)
        if copy is None or rank not in copy.waits_for:
            return None
        copy.waits_for.remove(rank)
        copy.num_whole = min(copy.num_whole, num_whole)
        if copy.waits_for:
            return None
        del self._running[number]
        self._note_end()
        count, total = copy.num_whole, len(copy.block_ids)
        if copy.kind == "delete":
            self._upkeep.end_deletion(copy.hashes, is_done=True)
        elif copy.kind == "save":
            self._settle(copy.hashes)
            self.counts.saved += count
            self.counts.unsaved += total - count
        elif copy.request is not None:
            self._num_loading -= total
            count = self._leave_condemned(copy, count)
            self.counts.loaded += count
            self.counts.missed += total - count
            _add(self._missed, copy.hashes[count:])
            if count < total:
                _add(self._missed_states, [block_hash for block_hash, _ in copy.states])
            first = len(copy.held) - total
            for index, block_id in enumerate(copy.block_ids[:count], first):
                store_block(self._pool, copy.request, index, block_id)
        self._end_states(copy, is_whole=count == total)
        self._pool.free(copy.held)
        return copy.request

    def _note_end(self) -> None:
        self.num_ended += 1
        self._is_late = False

    def _leave_condemned(self, copy: RunningCopy, count: int) -> int:
        """A job has read ``count`` leading blocks. Return how many of these blocks precede the
        first block that might contain NaN (``condemn``). All other blocks will be set to zero.
        """
        names = copy.hashes[:count]
        usable = next((n for n, h in enumerate(names) if self._upkeep.is_condemned(h)), count)
        self._pool.condemn(copy.block_ids[usable:count])
        return usable

    def _end_states(self, copy: RunningCopy, *, is_whole: bool) -> None:
        """Release the checkpoints that the job has written to files. Store the checkpoints that the
        job has read, or drop these checkpoints if a block is missing.

        Args:
            is_whole: whether all workers have copied all blocks.
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
        """End all copy jobs, because workers have dropped the jobs. Return the requests that waited
        for jobs.

        Call this method before the pool is cleared.
        """
        requests = self._readers
        for copy in self._running.values():
            if copy.kind == "delete":
                self._upkeep.end_deletion(copy.hashes, is_done=False)
            self._end_states(copy, is_whole=False)
            self._pool.free(copy.held)
        self._running.clear()
        self._num_loading = 0
        self.elsewhere.forget()
        self._existing = None
        self._is_late = False
        self._pending_states.clear()
        self._pending.clear()
        self._unsaved.clear()
        self._new.clear()
        return requests


def _add(known: dict[BlockHash, None], hashes: Sequence[BlockHash]) -> None:
    """Add hashes to ``known``. If ``known`` then has too many hashes, remove the oldest hashes."""
    known |= dict.fromkeys(hashes)
    while len(known) > MAX_PENDING:
        del known[next(iter(known))]
