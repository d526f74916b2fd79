"""Names for tokens that the host does not have: negative numbers, which are never token ids.

The last step's samples, and the drafts of all rows, are in one array of int32 on the device, the
*latest tokens*. ``i - num_latest`` names place i of it, like a negative index in Python. Without
drafts the latest tokens are the samples in the order of the last step's batch. With drafts, which
live longer, they are ordered by row: k drafts of each row, then the last token of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import aligned


def first_last(k: int, num_rows: int) -> int:
    """Return the place of row 0's last token, which is behind all drafts."""
    return aligned(num_rows * k)


@dataclass(frozen=True)
class References:
    """The names of one rank's latest tokens.

    Attributes:
        num_latest: number of latest tokens that the device keeps.
        k: drafts of each row.
        num_rows: number of rows on the device.
    """

    num_latest: int
    k: int
    num_rows: int

    def draft(self, rows: IntArray, index: IntArray) -> IntArray:
        """Name drafts, [n] each: draft ``index`` of a row."""
        return rows * self.k + index - self.num_latest

    def last(self, rows: IntArray) -> IntArray:
        """Name the last tokens of rows, [n], if there are drafts."""
        return first_last(self.k, self.num_rows) + rows - self.num_latest

    def sample(self, index: IntArray) -> IntArray:
        """Name samples of the last step, [n], if there are no drafts."""
        return index - self.num_latest
