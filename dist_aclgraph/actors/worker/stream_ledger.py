"""Counts a rank's streams, by the operation that uses them.

The rank's offer contains these counts and the free streams.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu


class StreamLedger:
    """Counts the device's free streams after each operation that can take streams.

    Attributes:
        taken: maps the name of an operation to the number of streams that it has allocated.
    """

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._available = npu.available_streams()
        self.taken: Counter[str] = Counter()

    def book(self, what: str) -> None:
        """Record ``what`` as the operation that uses all streams taken since the last call."""
        available = self._npu.available_streams()
        self.taken[what] += self._available - available
        if not self.taken[what]:
            del self.taken[what]
        self._available = available
