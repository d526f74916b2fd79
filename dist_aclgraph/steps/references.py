"""References to tokens that only the device has: negative numbers, which are never token ids.

The *latest tokens* are one array of int32 on the device. The reference ``i - num_latest`` means
element i of this array, like a negative index in Python. Without drafts, the array contains the
tokens that the last step has sampled, in the order of its batch. With drafts, the array contains
first the k drafts of each row, and then the last token of each row. The array is ordered by row,
because drafts are kept for more than one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.arrays.packing import aligned


def first_last(k: int, num_rows: int) -> int:
    """Return the index of row 0's last token in the array of latest tokens. In this array, the
    drafts of all rows come first.
    """
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
        """Return references to drafts, [n]. ``index`` contains the index of each draft among the
        drafts of its row.
        """
        return rows * self.k + index - self.num_latest

    def last(self, rows: IntArray) -> IntArray:
        """Return references to the last tokens of rows, [n]. This is used only with drafts."""
        return first_last(self.k, self.num_rows) + rows - self.num_latest

    def sample(self, index: IntArray) -> IntArray:
        """Return references to tokens that the last step has sampled, [n]. This is used only
        without drafts.
        """
        return index - self.num_latest
