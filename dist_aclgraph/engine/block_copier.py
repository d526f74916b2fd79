"""BlockCopier: copies KV blocks of one rank between the device and files. A second object of this
class copies recurrent states: each of its "blocks" is one slot of the state cache.

Blocks are copied through a small number of slots. A slot has memory on the device and pinned memory
of the host. A block consists of one part in each layer. All parts of a block are gathered in a
slot, so that one transfer moves all parts. Blocks are gathered from the caches and scattered to the
caches on the main stream, in the order of the engine's messages. So a block has the contents that
the scheduler expects. The transfers run on another stream, while steps run. One thread, the file
thread, reads and writes the files. The file thread never uses the device.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.planning.copy_slots import NUM_SLOTS, blocks_per_slot
from dist_aclgraph.steps.copies import JobKind

logger = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int64]
FileName = tuple[bytes, int]
State = Literal["free", "on device", "in files"]


@dataclass
class _Piece:
    """A part of a copy job. The blocks of this part fit in one ``_Slot``."""

    number: int
    index: int  # position among the pieces of the job
    is_load: bool
    block_ids: BlockIds
    files: Sequence[FileName]
    num_whole: int = 0  # how many blocks were written, or how many leading blocks were read


@dataclass
class _Upkeep:
    """A job that deletes or touches files. To touch a file means to update the file's time of last
    use. The job does not use the device.
    """

    number: int
    kind: JobKind
    files: deque[FileName]  # the files that must still be deleted or touched


@dataclass
class _BlockJob:
    """A copy job that runs. Its pieces may end in any order."""

    is_load: bool
    sizes: Sequence[int]  # number of blocks of each piece
    # Keys: indices of the pieces that have ended. Values: their ``num_whole``.
    whole: dict[int, int] = field(default_factory=dict)

    @property
    def num_whole(self) -> int:
        """If the job writes files: the number of blocks that were written. If the job reads files:
        the number of leading blocks that were read.
        """
        if not self.is_load:
            return sum(self.whole.values())
        count = 0
        for index, size in enumerate(self.sizes):
            count += self.whole[index]
            if self.whole[index] < size:
                break
        return count


class _Slot:
    """Memory for some blocks, on the device and on the host.

    Attributes:
        device, host, blocks: [num_blocks, block_bytes]; ``blocks`` is ``host`` as a NumPy array.
        piece: the piece that uses the slot; None if the slot is free.
        state: the present user of the slot: the device, the file thread, or none.
        is_void: whether the slot's piece was dropped. If true, the piece's result is not reported.
        ready: event that one stream records, and for which the other stream waits.
        done: event recorded after the slot's last work on the device.
    """

    def __init__(self, npu: Npu, num_blocks: int, block_bytes: int) -> None:
        shape = (num_blocks, block_bytes)
        self.device = torch.zeros(shape, dtype=torch.uint8, device=npu.device)
        self.host = npu.pinned(shape, torch.uint8)
        self.blocks = self.host.numpy()
        self.piece: _Piece | None = None
        self.state: State = "free"
        self.is_void = False
        # The slot uses these two events for all its transfers, because each new event would
        # allocate device memory.
        self.ready: Any = runtime().Event()
        self.done: Any = runtime().Event()


class BlockCopier:
    """Owns the slots, the transfer stream and the file thread. Only the thread that uses the device
    may call the methods.

    Args:
        tensors: returns the tensors of all layers' blocks; the first axis is the block id.
        num_slots: maximum number of pieces that are copied at the same time.
    """

    def __init__(
        self,
        npu: Npu,
        tensors: Callable[[], Sequence[Tensor]],
        tiers: KVTiers,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._npu = npu
        self._tensors = tensors
        self._tiers = tiers
        # Number of bytes of a block in each tensor, and in all tensors together. In a slot, each
        # block is contiguous, so that the file thread reads or writes a block with one system call.
        # More calls would be slow, because the thread waits for Python's global lock after each
        # call.
        self._sizes = [tensor[0].nbytes for tensor in tensors()]
        block_bytes = sum(self._sizes)
        self._blocks_per_slot = blocks_per_slot(block_bytes)
        self._slots = [_Slot(npu, self._blocks_per_slot, block_bytes) for _ in range(num_slots)]
        self._stream = runtime().Stream()
        self._main = runtime().current_stream()
        self._pieces: deque[_Piece] = deque()  # pieces that wait for a slot
        self._jobs: dict[int, _BlockJob] = {}
        self._ended: list[tuple[int, int]] = []
        self._upkeep: set[int] = set()  # numbers of the jobs that delete or touch files
        self._for_files: queue.SimpleQueue[_Slot | _Upkeep | None] = queue.SimpleQueue()
        self._from_files: queue.SimpleQueue[_Slot | _Upkeep] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_on_files, name="kv-files", daemon=True)
        self._thread.start()

    @property
    def num_read(self) -> dict[str, int]:
        """For each tier's name, the number of blocks that were read from this tier."""
        return dict(self._tiers.num_read)

    def begin(
        self, number: int, block_ids: BlockIds, files: Sequence[FileName], *, is_load: bool
    ) -> None:
        """Begin a copy job. Later calls of ``advance`` run the job.

        Args:
            block_ids: [n] int64, at least one.
            files: [n], for each block: the block's hash, and the number of earlier blocks of the
                prompt.
        """
        size = self._blocks_per_slot
        starts = range(0, len(block_ids), size)
        self._jobs[number] = _BlockJob(is_load, [len(block_ids[i : i + size]) for i in starts])
        self._pieces += (
            _Piece(number, n, is_load, block_ids[i : i + size], files[i : i + size])
            for n, i in enumerate(starts)
        )

    def begin_upkeep(self, number: int, kind: JobKind, files: Sequence[FileName]) -> None:
        """Begin a job that deletes or touches files (``_Upkeep``). The job may run before earlier
        jobs have written their blocks.
        """
        self._upkeep.add(number)
        self._for_files.put(_Upkeep(number, kind, deque(files)))

    def advance(self) -> list[tuple[int, int]]:
        """Continue all copy jobs, without waiting for the device or for files.

        Returns:
            One pair for each job that has ended since the last call: the job's number, and a number
            of blocks. If the job writes files, this is the number of blocks that were written. If
            the job reads files, this is the number of leading blocks that were read.

        Raises:
            RuntimeError: the device failed.
        """
        while not self._from_files.empty():
            work = self._from_files.get()
            if isinstance(work, _Slot):
                self._leave_files(work)
            elif work.number in self._upkeep:
                self._upkeep.remove(work.number)
                self._ended.append((work.number, 0))
        for slot in self._slots:
            if slot.state == "on device" and slot.done.query():
                self._leave_device(slot)
            if slot.state == "free" and self._pieces:
                self._enter(slot, self._pieces.popleft())
        ended, self._ended = self._ended, []
        return ended

    def _enter(self, slot: _Slot, piece: _Piece) -> None:
        slot.piece, slot.is_void = piece, False
        if piece.is_load:
            self._give_to_files(slot)
        else:
            self._gather(slot, piece)

    def _leave_device(self, slot: _Slot) -> None:
        piece = slot.piece
        assert piece is not None
        if piece.is_load:
            self._free(slot)
        else:
            self._give_to_files(slot)

    def _leave_files(self, slot: _Slot) -> None:
        piece = slot.piece
        assert piece is not None
        if piece.is_load and piece.num_whole and not slot.is_void:
            self._scatter(slot, piece)
        else:
            self._free(slot)

    def _free(self, slot: _Slot) -> None:
        piece, slot.piece, slot.state = slot.piece, None, "free"
        if slot.is_void:
            return
        assert piece is not None
        job = self._jobs[piece.number]
        job.whole[piece.index] = piece.num_whole
        if len(job.whole) == len(job.sizes):
            del self._jobs[piece.number]
            self._ended.append((piece.number, job.num_whole))

    # ---- on the device

    def _gather(self, slot: _Slot, piece: _Piece) -> None:
        """Launch the copy of a piece's blocks to the slot's pinned memory."""
        count = len(piece.block_ids)
        index = self._npu.upload(piece.block_ids)
        parts = [
            tensor.index_select(0, index).view(count, -1).view(torch.uint8)
            for tensor in self._tensors()
        ]
        torch.cat(parts, dim=1, out=slot.device[:count])
        slot.ready.record(self._main)
        self._stream.wait_event(slot.ready)
        with runtime().stream(self._stream):
            slot.host[:count].copy_(slot.device[:count], non_blocking=True)
        slot.done.record(self._stream)
        slot.state = "on device"

    def _scatter(self, slot: _Slot, piece: _Piece) -> None:
        """Launch the copy from pinned memory to the cache, for blocks that were read from files."""
        count = piece.num_whole
        index = self._npu.upload(piece.block_ids[:count])
        with runtime().stream(self._stream):
            slot.device[:count].copy_(slot.host[:count], non_blocking=True)
        slot.ready.record(self._stream)
        self._main.wait_event(slot.ready)
        parts = torch.split(slot.device[:count], self._sizes, dim=1)
        for tensor, part in zip(self._tensors(), parts, strict=True):
            values = part.contiguous().view(tensor.dtype).view(count, *tensor.shape[1:])
            tensor.index_copy_(0, index, values)
        slot.done.record(self._main)
        slot.state = "on device"

    # ---- in files

    def _give_to_files(self, slot: _Slot) -> None:
        slot.state = "in files"
        self._for_files.put(slot)

    def _work_on_files(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                if isinstance(work, _Upkeep):
                    if not self._keep_up(work):
                        self._for_files.put(work)
                        continue
                else:
                    piece = work.piece
                    assert piece is not None
                    piece.num_whole = self._work(work, piece)
            except Exception:  # the result says that the work failed, and the thread continues
                logger.exception("copying KV blocks failed")
            self._from_files.put(work)

    def _next_work(self) -> _Slot | _Upkeep | None:
        """Return the next work of the file thread; None if the thread must end. While no work is
        queued, write blocks to the second tier.
        """
        try:
            while self._for_files.empty() and self._tiers.write_late():
                pass
        except Exception:  # the block stays in the first tier only, which does no harm
            logger.exception("copying a KV block to the second tier failed")
        return self._for_files.get()

    def _keep_up(self, work: _Upkeep) -> bool:
        """Continue a job that deletes or touches files; return whether the job has ended.

        A job that touches files (updates their times of last use) pauses while other work waits,
        because requests may wait for that work. A job that deletes files does not pause. During a
        pause, a later job could write the same blocks again. After the pause, the first job would
        delete the new files.
        """
        while work.files:
            block_hash, depth = work.files.popleft()
            if work.kind == "delete":
                self._tiers.delete(block_hash)
                continue
            self._tiers.touch(block_hash, depth)
            if not self._for_files.empty():
                return not work.files
        return True

    def _work(self, slot: _Slot, piece: _Piece) -> int:
        """Read or write the files of a piece; return how many blocks were written, or how many
        leading blocks were read. After a block that cannot be read, no later block is read. A
        request can use a block only together with all earlier blocks.
        """
        count = 0
        for place, (block_hash, depth) in enumerate(piece.files):
            block = slot.blocks[place].data
            if slot.is_void:
                break
            if not piece.is_load:
                count += self._tiers.write(block_hash, block, depth)
            elif self._tiers.read(block_hash, block, self._sizes, depth):
                count += 1
            else:
                break
        return count

    # ---- the end

    def forget(self) -> None:
        """Drop all copy jobs, for example after an abort of the device."""
        self._pieces.clear()
        self._jobs.clear()
        self._upkeep.clear()
        self._ended.clear()
        for slot in self._slots:
            slot.is_void = True
            if slot.state == "on device":
                slot.piece, slot.state = None, "free"

    def end_files(self, timeout_s: float) -> bool:
        """Tell the thread that reads and writes files to end after its queued work. Return whether
        the thread has ended within ``timeout_s``.
        """
        self._for_files.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Drop all copy jobs, and tell the file thread to end."""
        self.forget()
        self._for_files.put(None)
