"""Pinned memory that small arrays are sent to the device from.

torch's allocator of pinned memory records an event where memory is freed that the device has copied
from: in a destructor, where an error ends the process. On a device that has failed it is one, and
the group could not come back in place. So nothing is freed here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

NUM_PARTS, PART_BYTES = 4, 1 << 20
ALIGNED_BYTES = 64


class _Part:
    """Attributes:
    is_left: whether its copies may still run; ``sent`` was recorded behind them then.
    """

    def __init__(self, sent: Any) -> None:
        self.memory = torch.empty(PART_BYTES, dtype=torch.uint8).pin_memory()
        self.sent = sent
        self.is_left = False


class Staging:
    """Owns the memory, whose parts are used in turn. All is sent on one stream.

    Args:
        stream: the one.
        make_event: returns an event of the device.
        waiting: the host waits inside; see ``Npu.waiting``.
    """

    def __init__(
        self,
        stream: Any,
        make_event: Callable[[], Any],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stream = stream
        self._waiting = waiting
        self._parts = [_Part(make_event()) for _ in range(NUM_PARTS)]
        self._index = self._used = 0

    def hold(self, array: np.ndarray) -> torch.Tensor:
        """Return a copy of the array, of at most ``PART_BYTES``, to be sent at once."""
        num_bytes = array.nbytes
        if self._used + num_bytes > PART_BYTES:
            self._go_on()
        begin = self._used
        self._used += -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        source = torch.from_numpy(array)
        room = self._parts[self._index].memory[begin : begin + num_bytes]
        return room.view(source.dtype).view(source.shape).copy_(source)

    def _go_on(self) -> None:
        """Take the next part, once the device has read what was in it."""
        left = self._parts[self._index]
        left.sent.record(self._stream)
        left.is_left = True
        self._index, self._used = (self._index + 1) % NUM_PARTS, 0
        part = self._parts[self._index]
        if part.is_left:
            with self._waiting():
                part.sent.synchronize()
