"""Counts the streams that each operation of a rank has taken.

The rank's offer contains these counts and the number of free streams.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu


class StreamLedger:
    """Counts the free streams of the device after each operation that may take streams.

    Attributes:
        taken: maps the name of an operation to the number of streams that the operation has taken.
    """

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._available = npu.available_streams()
        self.taken: Counter[str] = Counter()

    def book(self, what: str) -> None:
        """Count the streams that were taken since the last call as streams of the operation
        ``what``.
        """
        available = self._npu.available_streams()
        self.taken[what] += self._available - available
        if not self.taken[what]:
            del self.taken[what]
        self._available = available
