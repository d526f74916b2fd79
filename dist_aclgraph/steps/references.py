"""References to tokens that only the device has: negative numbers, which are never token ids.

The *latest tokens* are one array of int32 on the device. The reference ``i - num_latest`` means
element i of this array, like a negative index in Python. Without drafts, the array contains the
last step's samples in the order of its batch. With drafts, which are kept for more than one step,
the array is ordered by row: first k drafts of each row, then the last token of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import aligned


def first_last(k: int, num_rows: int) -> int:
    """Return the index of row 0's last token in the latest tokens, after all drafts."""
    return aligned(num_rows * k)


@dataclass(frozen=True)
class References:
    """Makes references to one rank's latest tokens.

    Attributes:
        num_latest: number of latest tokens that the device keeps.
        k: number of drafts of each row.
    """

    num_latest: int
    k: int
    num_rows: int

    def draft(self, rows: IntArray, index: IntArray) -> IntArray:
        """Return references to drafts, [n]; ``index`` is a draft's number in its row."""
        return rows * self.k + index - self.num_latest

    def last(self, rows: IntArray) -> IntArray:
        """Return references to the last tokens of rows, [n]. Only used if the model drafts."""
        return first_last(self.k, self.num_rows) + rows - self.num_latest

    def sample(self, index: IntArray) -> IntArray:
        """Return references to samples of the last step, [n]. Not used if the model drafts."""
        return index - self.num_latest
