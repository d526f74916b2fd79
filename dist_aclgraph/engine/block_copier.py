"""BlockCopier: copies KV blocks of one rank between the device and files. Recurrent states are
copied in the same way; then a block is the state in one slot of the cache.

Blocks pass through a few slots. A slot is memory on the device and pinned memory of the host. All
layers' parts of a block are gathered in the slot, so that one transfer moves them together. The
gathering and scattering run on the main stream, in the order of steps: so they see exactly the
contents that the engine's order promises. The transfers run on another stream, beside the steps. A
thread reads and writes the files; it never touches the device.
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
from dist_aclgraph.packing import pack_parts
from dist_aclgraph.planning.copy_slots import NUM_SLOTS, blocks_per_slot

logger = logging.getLogger(__name__)

BlockIds = npt.NDArray[np.int64]
State = Literal["free", "on device", "in files"]


@dataclass
class _Piece:
    """The part of a copy that fits in a slot."""

    number: int
    index: int  # position among the pieces of the copy
    is_load: bool
    block_ids: BlockIds
    hashes: Sequence[bytes]
    num_whole: int = 0  # number of first blocks that were copied


@dataclass
class _Job:
    """A copy that runs; each piece ends in its own time."""

    sizes: Sequence[int]  # number of blocks of each piece
    whole: dict[int, int] = field(default_factory=dict)  # number of copied blocks of ended pieces

    @property
    def num_whole(self) -> int:
        """Number of first blocks that were copied."""
        count = 0
        for index, size in enumerate(self.sizes):
            count += self.whole[index]
            if self.whole[index] < size:
                break
        return count


class _Slot:
    """Memory for some blocks, on the device and on the host.

    Attributes:
        piece: the piece that uses the slot; None if the slot is free.
        state: where the piece is at work.
        is_void: whether the piece was forgotten; then the slot becomes free without any result.
        ready: event between the two streams that use the slot.
        done: event after the slot's last work on the device.
    """

    def __init__(self, npu: Npu, num_bytes: int) -> None:
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=npu.device)
        self.host = npu.pinned((num_bytes,), torch.uint8)
        self.bytes = self.host.numpy().data
        self.piece: _Piece | None = None
        self.state: State = "free"
        self.is_void = False
        # Both are used again and again, because each new event takes memory of the device.
        self.ready: Any = runtime().Event()
        self.done: Any = runtime().Event()


class BlockCopier:
    """Owns the slots, the transfer stream and the thread for files. The methods are for the thread
    that works with the device.

    Args:
        tensors: returns the tensors of all layers' blocks; the first axis is the block id.
        num_slots: how many pieces of copies are at work at the same time.
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
        self._sizes = [tensor[0].nbytes for tensor in tensors()]  # bytes of a block
        self._blocks_per_slot = blocks_per_slot(sum(self._sizes))
        _, size = self._parts_of(self._blocks_per_slot)
        self._slots = [_Slot(npu, size) for _ in range(num_slots)]
        self._stream = runtime().Stream()
        self._main = runtime().current_stream()
        self._pieces: deque[_Piece] = deque()  # wait for a slot
        self._jobs: dict[int, _Job] = {}
        self._ended: list[tuple[int, int]] = []
        self._for_files: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._from_files: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_on_files, name="kv-files", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def begin(
        self, number: int, block_ids: BlockIds, hashes: Sequence[bytes], *, is_load: bool
    ) -> None:
        """Begin a copy, which runs while ``advance`` is called.

        Args:
            block_ids: [n] int64, at least one.
            hashes: [n], names of the blocks' files.
        """
        size = self._blocks_per_slot
        starts = range(0, len(block_ids), size)
        self._jobs[number] = _Job([len(block_ids[i : i + size]) for i in starts])
        self._pieces += (
            _Piece(number, n, is_load, block_ids[i : i + size], hashes[i : i + size])
            for n, i in enumerate(starts)
        )

    def advance(self) -> list[tuple[int, int]]:
        """Continue all copies, without waiting for the device or for files.

        Returns:
            For each copy that has ended, its number, and how many of its first blocks were copied.

        Raises:
            RuntimeError: the device failed.
        """
        while not self._from_files.empty():
            self._leave_files(self._from_files.get())
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

    def _parts_of(self, num_blocks: int) -> tuple[list[slice], int]:
        """Return the place of each tensor's part in a slot, in bytes, and the used bytes."""
        return pack_parts(num_blocks * size for size in self._sizes)

    def _parts(self, slot: _Slot, num_blocks: int) -> list[Tensor]:
        """Return the slot's part for each tensor, [num_blocks, ...]."""
        places, _ = self._parts_of(num_blocks)
        return [
            slot.device[place].view(tensor.dtype).view(num_blocks, *tensor.shape[1:])
            for tensor, place in zip(self._tensors(), places, strict=True)
        ]

    def _gather(self, slot: _Slot, piece: _Piece) -> None:
        """Queue the copy of blocks to the slot's pinned memory."""
        count = len(piece.block_ids)
        index = self._npu.upload(piece.block_ids)
        for tensor, part in zip(self._tensors(), self._parts(slot, count), strict=True):
            torch.index_select(tensor, 0, index, out=part)
        slot.ready.record(self._main)
        self._stream.wait_event(slot.ready)
        _, used = self._parts_of(count)
        with runtime().stream(self._stream):
            slot.host[:used].copy_(slot.device[:used], non_blocking=True)
        slot.done.record(self._stream)
        slot.state = "on device"

    def _scatter(self, slot: _Slot, piece: _Piece) -> None:
        """Queue the copy of the slot's pinned memory to the blocks that were read."""
        count = len(piece.block_ids)
        index = self._npu.upload(piece.block_ids[: piece.num_whole])
        _, used = self._parts_of(count)
        with runtime().stream(self._stream):
            slot.device[:used].copy_(slot.host[:used], non_blocking=True)
        slot.ready.record(self._stream)
        self._main.wait_event(slot.ready)
        for tensor, part in zip(self._tensors(), self._parts(slot, count), strict=True):
            tensor.index_copy_(0, index, part[: piece.num_whole])
        slot.done.record(self._main)
        slot.state = "on device"

    # ---- in files

    def _give_to_files(self, slot: _Slot) -> None:
        slot.state = "in files"
        self._for_files.put(slot)

    def _work_on_files(self) -> None:
        while (slot := self._for_files.get()) is not None:
            piece = slot.piece
            assert piece is not None
            try:
                piece.num_whole = self._work(slot, piece)
            except Exception:  # the copy counts as failed, and the thread must go on
                logger.exception("copying KV blocks failed")
            self._from_files.put(slot)

    def _work(self, slot: _Slot, piece: _Piece) -> int:
        """Read or write the files of a piece; return the number of first blocks that succeeded."""
        call = self._tiers.read if piece.is_load else self._tiers.write
        for place, block_hash in enumerate(piece.hashes):
            if slot.is_void or not call(block_hash, self._buffers(slot, piece, place)):
                return place
        return len(piece.hashes)

    def _buffers(self, slot: _Slot, piece: _Piece, place: int) -> list[memoryview]:
        """Return the host memory of a piece's block: one buffer for each tensor."""
        places, _ = self._parts_of(len(piece.block_ids))
        starts = [part.start + place * size for part, size in zip(places, self._sizes, strict=True)]
        return [
            slot.bytes[start : start + size]
            for start, size in zip(starts, self._sizes, strict=True)
        ]

    # ---- the end

    def forget(self) -> None:
        """Drop all copies, for example after an abort of the device."""
        self._pieces.clear()
        self._jobs.clear()
        self._ended.clear()
        for slot in self._slots:
            slot.is_void = True
            if slot.state == "on device":
                slot.piece, slot.state = None, "free"

    def close(self) -> None:
        """Drop all copies and let the thread end."""
        self.forget()
        self._for_files.put(None)
