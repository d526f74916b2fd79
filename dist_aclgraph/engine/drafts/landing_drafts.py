"""Copies drafts to the host, which needs them to compute the masks of the next step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import Npu, runtime


class LandingDrafts:
    """Owns the pinned memory to which the drafts of all rows are copied."""

    def __init__(self, npu: Npu, max_rows: int, k: int) -> None:
        self._npu = npu
        self._memory = npu.pinned((max_rows + 1, k), torch.int32)
        self._ready: Any = runtime().Event()
        self._stream = runtime().current_stream()

    def send(self, drafts: Tensor) -> None:
        """Queue a copy of [max_rows + 1, k] drafts; the host does not wait."""
        self._memory.copy_(drafts, non_blocking=True)
        self._ready.record(self._stream)

    def read(self) -> IntArray:
        """Wait for the copy that was queued last; return [max_rows + 1, k] drafts."""
        with self._npu.waiting():
            self._ready.synchronize()
        drafts: IntArray = self._memory.numpy()
        return drafts
