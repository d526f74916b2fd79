"""Looks up block files without waiting for a disk.

If a network file system hangs, a call that looks up a file does not return. So a separate thread
looks up files on a disk. If a look-up takes too long, the caller assumes that the file is not on
the disk. For some time after this, only files in memory are looked up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.tiers import DISK, HOST, KVTiers
from dist_aclgraph.logs import event

LIMIT_S = 1.0  # seconds; maximum duration of a look-up on the disk
PAUSE_S = 30.0  # seconds for which the disk is not used after a look-up that takes too long
# Seconds that the caller waits for an answer. Most answers arrive within this time, so that the
# next step can use them. If an earlier look-up still has no answer, the caller does not wait.
# Therefore, several slow look-ups delay a step only once.
GRACE_S = 0.001

T = TypeVar("T")
HasFile = Callable[[BlockHash], bool]
Answer = Callable[[], T | None]  # returns the result of a look-up; None until the look-up has ended
# A function that begins to fetch the files of blocks into the node's first tier. Its arguments are
# the hashes of the blocks, and the index of the first of these blocks in the prompt. The answer
# becomes True when the fetch has succeeded or failed.
FetchBlocks = Callable[[Sequence[BlockHash], int], Answer[bool]]

logger = logging.getLogger(__name__)


def _count_nothing() -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Files:
    """Functions that look up files. A result may be wrong for two reasons: only the files of a
    data-parallel rank's first worker are looked up, and files can be deleted at any time.

    Attributes:
        has: takes a block's hash; returns whether the block has a file.
        has_state: takes a block's hash; returns whether the checkpoint after the block has a file.
            None if the model has no recurrent state.
        num_bytes: returns the size of all files in each tier; the keys are the tiers' names.
    """

    has: HasFile
    has_state: HasFile | None = None
    num_bytes: Callable[[], dict[str, int]] = _count_nothing


@dataclass(frozen=True)
class Source:
    """The group that has the blocks of a request. Workers on nodes without the engine fetch the
    blocks from this group.

    Attributes:
        message: the address of the group, encoded for ``BlockFetches.decode_source``.
        is_wanted: returns whether the request still waits for the fetch.
    """

    message: bytes
    is_wanted: Callable[[], bool]


LookUp = Callable[[Files], T]


def count_found(
    hashes: Sequence[BlockHash], files: Files, is_refused: HasFile = lambda _: False
) -> int:
    """Return how many leading blocks of a prompt have files. With recurrent state, the last of
    these blocks also has a checkpoint with a file.

    The binary search assumes that no file exists after the first missing file, because files of
    later blocks are deleted first (``block_files``). If this assumption is wrong, the result may be
    too large. In that case, the read of the missing file fails later. The first block's file is
    always looked up, because this file can be missing although files of later blocks exist. If a
    prefix stays in the device's cache, no request reads the prefix's files. These files become the
    least recently used files, and are deleted first.

    Args:
        is_refused: returns whether a block's file must not be used.
    """

    def is_missing(index: int) -> bool:
        return is_refused(hashes[index]) or not files.has(hashes[index])

    if not hashes or is_missing(0):
        return 0
    count = bisect_left(range(len(hashes)), True, key=is_missing)
    if files.has_state is None:
        return count
    ends = (n for n in range(count, 0, -1) if files.has_state(hashes[n - 1]))
    return next(ends, 0)


class Existing(NamedTuple):
    """The hashes of blocks that have files, and the hashes of blocks after which a checkpoint has a
    file.
    """

    blocks: Collection[BlockHash]
    states: Collection[BlockHash]


def find_existing(
    blocks: Sequence[BlockHash], states: Sequence[BlockHash], files: Files
) -> Existing:
    """Look up the files of the blocks in ``blocks``, and the files of the checkpoints that follow
    the blocks in ``states``.
    """
    has_state = files.has_state
    return Existing(
        {each for each in blocks if files.has(each)},
        {each for each in states if has_state is not None and has_state(each)},
    )


class LookUps:
    """Looks up files in the caller's thread.

    Use this class only for files in memory, because a look-up on a disk could hang.

    Attributes:
        clock: returns the time in seconds.
    """

    num_late = 0  # number of look-ups that took longer than ``LIMIT_S``

    def __init__(self, files: Files, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self.clock = clock
        self._num_bytes: dict[str, int] = {}
        self._counted: Answer[dict[str, int]] = _count_nothing

    @property
    def has_states(self) -> bool:
        return self._files.has_state is not None

    def ask(self, look_up: LookUp[T]) -> Answer[T]:
        """Begin a look-up; return its ``Answer``. The function ``look_up`` must not return None."""
        result = look_up(self._files)
        return lambda: result

    def close(self) -> None:
        """End the thread, if there is one. Call no method after this call."""

    def num_bytes(self) -> dict[str, int]:
        """Return, for each tier of this node, the total size of its files at the last look-up.

        Any thread may call this.
        """
        # The first pass of this loop reads the answer of the last look-up, and begins a new
        # look-up. The second pass reads the answer of the new look-up, if it has already arrived.
        for _ in range(2):
            if (found := self._counted()) is None:
                break
            self._num_bytes, self._counted = found, self.ask(lambda files: files.num_bytes())
        return self._num_bytes


@dataclass(eq=False)
class _Call:
    run: Callable[[], Any]
    deadline_s: float
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None  # None if the call failed, or was skipped after its deadline
    is_late: bool = False


class DiskLookUps(LookUps):
    """Looks up files in a separate thread. Any thread may call the methods.

    Args:
        files: the files in memory.
        everywhere: the files in memory and on the disk.
    """

    def __init__(
        self, files: Files, everywhere: Files, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(files, clock)
        self._everywhere = everywhere
        self._late: _Call | None = None  # a call that runs for longer than ``LIMIT_S``
        self._resumes_s = 0.0
        self._last: _Call | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="kv-look-ups", daemon=True).start()

    def ask(self, look_up: LookUp[T]) -> Answer[T]:
        if self._is_silent():
            return super().ask(look_up)
        call = _Call(partial(look_up, self._everywhere), self.clock() + LIMIT_S)
        last, self._last = self._last, call
        self._calls.put(call)
        if last is None or last.done.is_set():
            call.done.wait(GRACE_S)
        return partial(self._result, call, look_up)

    def close(self) -> None:
        self._calls.put(None)

    def _is_silent(self) -> bool:
        """True if the disk is not used at present, because a look-up took too long."""
        late = self._late  # read once, because another thread may set it to None
        if late is None:
            return False
        if not late.done.is_set() or self.clock() < self._resumes_s:
            return True
        self._late = None
        return False

    def _result(self, call: _Call, look_up: LookUp[T]) -> T | None:
        if not (call.done.is_set() or call.is_late):
            if self.clock() < call.deadline_s:
                return None
            self._give_up(call)
        result: T | None = call.result
        return look_up(self._files) if result is None else result

    def _give_up(self, call: _Call) -> None:
        call.is_late = True
        self.num_late += 1
        self._resumes_s = self.clock() + PAUSE_S
        if self._late is None:
            self._late = call
            event(logger, "kv_disk_silent", logging.WARNING, limit_s=LIMIT_S, pause_s=PAUSE_S)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.is_late:
                try:
                    call.result = call.run()
                except Exception:  # the thread continues; the caller uses the files in memory
                    logger.exception("looking up KV files failed")
            call.done.set()


def find_or_fetch(
    ask: Callable[[], Answer[int]], fetch: FetchBlocks, hashes: Sequence[BlockHash]
) -> Answer[int]:
    """Return the number of leading blocks of ``hashes`` that have files on this node, after files
    were fetched from other nodes.

    Args:
        ask: begins to look up how many leading blocks have files on this node. If this is not the
            number of all blocks, all further blocks are fetched, and ``ask`` is called again.
    """

    def turns() -> Iterator[int | None]:
        found = ask()
        while (count := found()) is None:
            yield None
        if count < len(hashes):
            fetched = fetch(hashes[count:], count)
            while fetched() is None:
                yield None
            found = ask()
        while True:
            yield found()

    return partial(next, turns())


def look_ups_of(tiers: KVTiers, states: KVTiers | None) -> LookUps:
    """Return an object that looks up the files of blocks; for a model with recurrent state, also
    the files of checkpoints.
    """
    has_state = None if states is None else states.has
    everywhere = Files(tiers.has, has_state, tiers.num_bytes)
    if DISK not in tiers.names:
        return LookUps(everywhere)
    memory = Files(
        partial(tiers.has, only=HOST),
        None if states is None else partial(states.has, only=HOST),
        partial(tiers.num_bytes, only=HOST),
    )
    return DiskLookUps(memory, everywhere)
