"""Fake files of KV blocks, without a device. Contents move between the cache of a fake worker and a
dict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import Answer, Files, LookUp, LookUps
from dist_aclgraph.steps.copies import CopyJob
from tests.unit.scheduler.fake_worker import FakeWorker

T = TypeVar("T")


@dataclass
class _Running:
    job: CopyJob
    dp_rank: int
    ranks: list[int]  # ranks that have not ended this copy
    has_moved: bool = False
    num_whole: int = 0


class _LateLookUps(LookUps):
    def __init__(self, chance: random.Random, files: Files) -> None:
        super().__init__(files)
        self._chance = chance

    def ask(self, look_up: LookUp[T]) -> Answer[T]:
        turns = self._chance.choice([0, 0, 1, 3])
        answer, late = super().ask(look_up), iter(range(turns))
        return lambda: answer() if next(late, None) is None else None


class FakeFiles:
    """Copies blocks of all data-parallel ranks, in random order and at random times.

    At random, files disappear, and ranks fail to read blocks. A fetch brings files of blocks back.
    """

    def __init__(self, chance: random.Random, workers: list[FakeWorker], tp: int) -> None:
        self.contents: dict[bytes, np.ndarray] = {}
        self.states: dict[bytes, int] = {}
        self._elsewhere: dict[bytes, np.ndarray] = {}  # blocks whose files have disappeared
        self._chance = chance
        self._workers = workers
        self._tp = tp
        self._running: list[_Running] = []

    def look_ups(self, *, has_states: bool) -> LookUps:
        """Return look-ups whose answers come at random times."""
        has_state = self.states.__contains__ if has_states else None
        return _LateLookUps(self._chance, Files(self.contents.__contains__, has_state))

    def begin(self, jobs: list[tuple[CopyJob, ...]]) -> None:
        for dp_rank, each in enumerate(jobs):
            ranks = list(range(dp_rank * self._tp, (dp_rank + 1) * self._tp))
            self._running += (_Running(job, dp_rank, list(ranks)) for job in each)

    def fetch(self, hashes: Sequence[BlockHash], depth: int) -> Answer[bool]:
        """Bring back, at a random time, the files of some of the first blocks in ``hashes``; see
        ``FetchBlocks``.
        """
        late = iter(range(self._chance.choice([0, 1, 3])))

        def ended() -> bool | None:
            if next(late, None) is not None:
                return None
            for name in hashes:
                if name not in self._elsewhere:
                    break
                self.contents[name] = self._elsewhere[name]
            return True

        return ended

    def advance(self) -> Iterator[tuple[int, int, int]]:
        """Continue some of the copies. For each copy that has ended, yield its number, its rank,
        and its number of blocks.
        """
        self._elsewhere |= self.contents
        for files in (self.contents, self.states):
            if files and self._chance.random() < 0.05:
                del files[self._chance.choice(list(files))]
        for copy in list(self._running):
            if self._chance.random() < 0.4:
                continue
            if not copy.has_moved:
                copy.num_whole, copy.has_moved = self._move(copy), True
                continue
            rank = copy.ranks.pop(self._chance.randrange(len(copy.ranks)))
            fails = copy.job.is_load and self._chance.random() < 0.1
            yield (
                copy.job.number,
                rank,
                self._chance.randint(0, copy.num_whole) if fails else (copy.num_whole),
            )
            if not copy.ranks:
                self._running.remove(copy)

    def _move(self, copy: _Running) -> int:
        job, cache = copy.job, self._workers[copy.dp_rank].cache
        names = [job.hashes[i : i + HASH_BYTES] for i in range(0, len(job.hashes), HASH_BYTES)]
        if job.is_upkeep:
            for name in names if job.kind == "delete" else ():
                self.contents.pop(name, None)
                self.states.pop(name, None)
            return 0
        if not self._move_states(copy):
            return 0
        block_ids = unpack_ints(job.block_ids).tolist()
        for count, (block_id, name) in enumerate(zip(block_ids, names, strict=True)):
            if not job.is_load:
                self.contents.setdefault(name, cache[block_id].copy())
                assert (self.contents[name] == cache[block_id]).all(), "equal names, other contents"
            elif name in self.contents:
                cache[block_id] = self.contents[name]
            else:
                return count
        return len(names)

    def _move_states(self, copy: _Running) -> bool:
        """Copy the checkpoints of a job; return false if the job loads checkpoints and a file does
        not exist.
        """
        job, states = copy.job, self._workers[copy.dp_rank].states
        names = [
            job.state_hashes[i : i + HASH_BYTES]
            for i in range(0, len(job.state_hashes), HASH_BYTES)
        ]
        for checkpoint, name in zip(unpack_ints(job.checkpoints).tolist(), names, strict=True):
            assert states is not None
            if not job.is_load:
                found = self.states.setdefault(name, states.contents(checkpoint))
                assert found == states.contents(checkpoint), "equal names, other states"
            elif name in self.states:
                states.write(checkpoint, self.states[name])
            else:
                return False
        return True

    def forget(self) -> None:
        """Drop all copies, as workers do after an abort of their devices."""
        self._running.clear()
