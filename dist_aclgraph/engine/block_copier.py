"""BlockCopier: copies KV blocks of one rank between the device and files.

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
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.kv.block_pool import HASH_BYTES
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.planning.copy_slots import NUM_SLOTS, blocks_per_slot
from dist_aclgraph.steps.copies import CopyJob

logger = logging.getLogger(__name__)

State = Literal["free", "on device", "in files"]


@dataclass
class _Piece:
    """The part of a copy that fits in a slot."""

    number: int
    index: int  # position among the pieces of the copy
    is_load: bool
    block_ids: IntArray
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
        done: event after the slot's last work on the device.
    """

    def __init__(self, npu: Npu, num_elements: int, dtype: torch.dtype) -> None:
        self.device = torch.zeros(num_elements, dtype=dtype, device=npu.device)
        self.host = npu.pinned((num_elements,), dtype)
        self.bytes = self.host.view(torch.uint8).numpy().data
        self.piece: _Piece | None = None
        self.state: State = "free"
        self.is_void = False
        self.done: Any = runtime().Event()


class BlockCopier:
    """Owns the slots, the transfer stream and the thread for files. The methods are for the thread
    that works with the device.

    Args:
        tensors: returns the tensors of all layers' blocks; the first axis is the block id. All
            have the same dtype.
    """

    def __init__(self, npu: Npu, tensors: Callable[[], Sequence[Tensor]], tiers: KVTiers) -> None:
        self._npu = npu
        self._tensors = tensors
        self._tiers = tiers
        parts = tensors()
        self._num_elements = [part[0].numel() for part in parts]
        self._item_bytes = parts[0].element_size()
        block_bytes = sum(self._num_elements) * self._item_bytes
        self._blocks_per_slot = blocks_per_slot(block_bytes)
        size = self._blocks_per_slot * sum(self._num_elements)
        self._slots = [_Slot(npu, size, parts[0].dtype) for _ in range(NUM_SLOTS)]
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

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        """Begin copies. Each of them runs while ``advance`` is called."""
        size = self._blocks_per_slot
        for job in jobs:
            block_ids = unpack_ints(job.block_ids)
            hashes = [job.hashes[i : i + HASH_BYTES] for i in range(0, len(job.hashes), HASH_BYTES)]
            starts = range(0, len(block_ids), size)
            self._jobs[job.number] = _Job([len(block_ids[i : i + size]) for i in starts])
            self._pieces += (
                _Piece(job.number, n, job.is_load, block_ids[i : i + size], hashes[i : i + size])
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

    def _parts(self, flat: Tensor, num_blocks: int) -> list[Tensor]:
        """Return the slot's part for each tensor, [num_blocks, ...]."""
        parts, start = [], 0
        for tensor, size in zip(self._tensors(), self._num_elements, strict=True):
            end = start + num_blocks * size
            parts.append(flat[start:end].view(num_blocks, *tensor.shape[1:]))
            start = end
        return parts

    def _used(self, flat: Tensor, num_blocks: int) -> Tensor:
        return flat[: num_blocks * sum(self._num_elements)]

    def _gather(self, slot: _Slot, piece: _Piece) -> None:
        """Queue the copy of blocks to the slot's pinned memory."""
        count = len(piece.block_ids)
        index = self._npu.upload(piece.block_ids.astype(np.int64))
        for tensor, part in zip(self._tensors(), self._parts(slot.device, count), strict=True):
            torch.index_select(tensor, 0, index, out=part)
        self._stream.wait_stream(self._main)
        with runtime().stream(self._stream):
            self._used(slot.host, count).copy_(self._used(slot.device, count), non_blocking=True)
        slot.done.record(self._stream)
        slot.state = "on device"

    def _scatter(self, slot: _Slot, piece: _Piece) -> None:
        """Queue the copy of the slot's pinned memory to the blocks that were read."""
        count = len(piece.block_ids)
        index = self._npu.upload(piece.block_ids[: piece.num_whole].astype(np.int64))
        with runtime().stream(self._stream):
            self._used(slot.device, count).copy_(self._used(slot.host, count), non_blocking=True)
        self._main.wait_stream(self._stream)
        for tensor, part in zip(self._tensors(), self._parts(slot.device, count), strict=True):
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
        buffers, start = [], 0
        for size in self._num_elements:
            num_bytes = size * self._item_bytes
            at = start + place * num_bytes
            buffers.append(slot.bytes[at : at + num_bytes])
            start += len(piece.block_ids) * num_bytes
        return buffers

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
