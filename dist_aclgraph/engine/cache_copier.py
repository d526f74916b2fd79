"""CacheCopier: runs one rank's copy jobs. A job copies KV blocks, checkpoints of recurrent states,
or both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.engine.block_copier import BlockCopier, FileName
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.steps.copies import CopyJob

BLOCKS, STATES = 0, 1

logger = logging.getLogger(__name__)


@dataclass
class _PartsJob:
    """A running copy job. It has one part for KV blocks, one part for recurrent states, or both.
    ``num_whole`` contains the results of the parts that have ended.
    """

    is_load: bool
    num_states: int
    parts: set[int]
    num_whole: dict[int, int] = field(default_factory=dict)

    @property
    def result(self) -> int:
        """Number of leading blocks that were copied. The number is 0 if the job's recurrent state
        could not be read, because a request cannot start without this state.
        """
        has_states = self.num_whole.get(STATES, 0) == self.num_states
        return 0 if self.is_load and not has_states else self.num_whole.get(BLOCKS, 0)


class CacheCopier:
    """Owns the objects that copy KV blocks and recurrent states. Only the thread that uses the
    device may call the methods.

    Args:
        states: copies states; None if the model has no recurrent state.
        slots: computes the slots of checkpoints in the state cache; None if the model has no
            recurrent state.
    """

    def __init__(
        self, blocks: BlockCopier, states: BlockCopier | None, slots: StateSlots | None
    ) -> None:
        self._blocks = blocks
        self._states = states
        self._slots = slots
        self._jobs: dict[int, _PartsJob] = {}

    @property
    def num_read(self) -> dict[str, int]:
        """For each tier's name, the number of KV blocks that were read from this tier; recurrent
        states are not counted.
        """
        return self._blocks.num_read

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        """Begin copy jobs. Later calls of ``advance`` run the jobs."""
        for job in jobs:
            block_ids, checkpoints = unpack_ints(job.block_ids), unpack_ints(job.checkpoints)
            parts = {BLOCKS} if job.hashes else set[int]()
            if job.state_hashes:
                parts.add(STATES)
            self._jobs[job.number] = _PartsJob(job.is_load, len(checkpoints), parts)
            if job.is_upkeep:
                self._begin_upkeep(job, parts)
                continue
            if BLOCKS in parts:
                self._begin(self._blocks, job, block_ids, job.hashes, unpack_ints(job.depths))
            if STATES in parts:
                assert self._states is not None and self._slots is not None
                slots = self._slots.checkpoints(checkpoints)
                self._begin(self._states, job, slots, job.state_hashes, None)

    def advance(self) -> list[tuple[int, int]]:
        """Continue all copy jobs; see ``BlockCopier.advance``."""
        ended = []
        for part, copier in ((BLOCKS, self._blocks), (STATES, self._states)):
            for number, num_whole in [] if copier is None else copier.advance():
                job = self._jobs[number]
                job.num_whole[part] = num_whole
                if job.num_whole.keys() == job.parts:
                    del self._jobs[number]
                    ended.append((number, job.result))
        return ended

    def forget(self) -> None:
        """Drop all copy jobs, for example after an abort of the device."""
        self._jobs.clear()
        for copier in (self._blocks, self._states):
            if copier is not None:
                copier.forget()

    def end_files(self, timeout_s: float) -> None:
        """Wait until no thread uses files. The caller must not begin a job after this call."""
        deadline_s = time.monotonic() + timeout_s
        for copier in (self._blocks, self._states):
            if copier is not None and not copier.end_files(max(0, deadline_s - time.monotonic())):
                logger.warning("files of KV blocks are still used after %g s", timeout_s)

    def close(self) -> None:
        """Drop all copy jobs, and tell the threads to end."""
        self._jobs.clear()
        for copier in (self._blocks, self._states):
            if copier is not None:
                copier.close()

    @staticmethod
    def _begin(
        copier: BlockCopier, job: CopyJob, places: IntArray, hashes: bytes, depths: IntArray | None
    ) -> None:
        files = _files(hashes, depths)
        copier.begin(job.number, places.astype(np.int64), files, is_load=job.is_load)

    def _begin_upkeep(self, job: CopyJob, parts: Collection[int]) -> None:
        """Begin a job that deletes files or updates their times of last use. It does not use the
        device.
        """
        for part, copier, hashes, depths in (
            (BLOCKS, self._blocks, job.hashes, unpack_ints(job.depths)),
            (STATES, self._states, job.state_hashes, None),
        ):
            if part in parts:
                assert copier is not None
                copier.begin_upkeep(job.number, job.kind, _files(hashes, depths))


def _files(hashes: bytes, depths: IntArray | None) -> list[FileName]:
    names = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
    return list(zip(names, [0] * len(names) if depths is None else depths.tolist(), strict=True))
