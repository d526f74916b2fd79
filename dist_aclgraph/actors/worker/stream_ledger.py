"""The users of a rank's streams, which its offer lists beside the number of free ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu


class StreamLedger:
    """Counts the device's streams whenever something that takes some has been done.

    Attributes:
        taken: streams by the name of what holds them; an operation that is repeated adds to them.
    """

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._available = npu.available_streams()
        self.taken: Counter[str] = Counter()

    def book(self, what: str) -> None:
        """Enter the user of the streams that were taken since the last entry."""
        available = self._npu.available_streams()
        self.taken[what] += self._available - available
        if not self.taken[what]:
            del self.taken[what]
        self._available = available
