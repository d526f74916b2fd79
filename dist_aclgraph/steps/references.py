"""How a step names tokens that the host does not have: by negative numbers, which no token id is.

What the last step sampled, and the drafts of all rows, lie in one array of int32 on the device, the
*latest tokens*. ``i - num_latest`` names place i of it, like an index of Python that counts from
the end. Without drafts the latest tokens are the samples in the order of the last step's batch.
With drafts, which live longer, they stand by row: k drafts of each, then the last token of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import aligned


def first_last(k: int, num_rows: int) -> int:
    """Return the place of row 0's last token, behind all drafts."""
    return aligned(num_rows * k)


@dataclass(frozen=True)
class References:
    """The names of one rank's latest tokens.

    Attributes:
        num_latest: how many latest tokens the device keeps.
        k: drafts of each row.
        num_rows: on the device.
    """

    num_latest: int
    k: int
    num_rows: int

    def draft(self, rows: IntArray, index: IntArray) -> IntArray:
        """Name drafts, [n] each: the ``index``-th of k of a row."""
        return rows * self.k + index - self.num_latest

    def last(self, rows: IntArray) -> IntArray:
        """Name the last tokens of rows, [n], where there are drafts."""
        return first_last(self.k, self.num_rows) + rows - self.num_latest

    def sample(self, index: IntArray) -> IntArray:
        """Name what the last step sampled, [n], where there are no drafts."""
        return index - self.num_latest
