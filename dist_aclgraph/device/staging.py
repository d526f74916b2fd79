"""Pinned memory from which small arrays are sent to the device.

When torch's allocator frees pinned memory from which the device has copied, a destructor records an
event. On a failed device, recording an event raises an error, and an error in a destructor ends the
process. A group whose process has ended cannot be resumed. To avoid these errors, this memory is
never freed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

NUM_PARTS, MAX_PARTS, PART_BYTES = 4, 64, 1 << 20
ALIGNED_BYTES = 64


class _Part:
    """A part of the pinned memory.

    Attributes:
        is_left: whether this part is full. If true, the event ``sent`` was recorded after the last
            copy from this part to the device.
    """

    def __init__(self, sent: Any) -> None:
        self.memory = torch.empty(PART_BYTES, dtype=torch.uint8).pin_memory()
        self.sent = sent
        self.is_left = False


class Staging:
    """Owns the pinned memory from which arrays are sent.

    The object fills one part of the memory after another, in a circle. If the device has not yet
    read the next part, a new part is added. If there are already ``MAX_PARTS`` parts, the host
    waits.

    Args:
        waiting: returns a context, inside which the host waits for the device; see ``Npu.waiting``.
    """

    def __init__(
        self,
        stream: Any,
        make_event: Callable[[], Any],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stream = stream
        self._make_event = make_event
        self._waiting = waiting
        self._parts = [_Part(make_event()) for _ in range(NUM_PARTS)]
        self._index = self._used = 0

    def send(self, array: np.ndarray, device: torch.device) -> torch.Tensor:
        """Return the array's copy on the device. The transfer may still be in progress."""
        source = torch.from_numpy(array)
        if array.nbytes <= PART_BYTES:
            return self._hold(source).to(device, non_blocking=True)
        flat, at_once = source.reshape(-1), PART_BYTES // array.itemsize
        sent = torch.empty(flat.shape, dtype=flat.dtype, device=device)
        for begin in range(0, len(flat), at_once):
            part = slice(begin, begin + at_once)
            sent[part].copy_(self._hold(flat[part]), non_blocking=True)
        return sent.view(source.shape)

    def _hold(self, source: torch.Tensor) -> torch.Tensor:
        """Copy an array of at most ``PART_BYTES`` to pinned memory, and return this copy. The
        caller must send the copy before the next call.
        """
        if self._used + source.nbytes > PART_BYTES:
            self._go_on()
        begin = self._used
        self._used += -(-source.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        room = self._parts[self._index].memory[begin : begin + source.nbytes]
        return room.view(source.dtype).view(source.shape).copy_(source)

    def _go_on(self) -> None:
        """Go to the next part of the memory. If the device has not yet read the next part, add a
        new part. If there are already ``MAX_PARTS`` parts, wait for the device.
        """
        left = self._parts[self._index]
        left.sent.record(self._stream)
        left.is_left = True
        self._index, self._used = (self._index + 1) % len(self._parts), 0
        part = self._parts[self._index]
        if not part.is_left or part.sent.query():
            return
        if len(self._parts) < MAX_PARTS:
            self._parts.insert(self._index, _Part(self._make_event()))
            return
        with self._waiting():
            part.sent.synchronize()
