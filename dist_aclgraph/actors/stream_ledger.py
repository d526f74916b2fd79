"""Who took a rank's streams: what its offer says beside the number that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu


class StreamLedger:
    """Counts the device's streams whenever something that takes some has been done."""

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._available = npu.available_streams()
        self.taken: dict[str, int] = {}

    def book(self, what: str) -> None:
        """Enter who took the streams that went since the last entry."""
        available = self._npu.available_streams()
        if available != self._available:
            self.taken[what] = self._available - available
        self._available = available
