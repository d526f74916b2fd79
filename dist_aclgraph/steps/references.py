"""How a step names tokens that the host does not have: by ids beyond the vocabulary.

What the last step sampled, and the drafts of all rows, lie in one array of int32 on the device, the
*latest tokens*; id ``first + i`` names place i of it. Without drafts they are the samples in the
order of the last step's batch. With drafts, which live longer, they stand by row: k drafts of each,
then the last token of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import aligned


def first_reference(vocab_size: int) -> int:
    """Return the least id that is a reference: the latest tokens lie on an aligned place."""
    return aligned(vocab_size)


def first_last(k: int, num_rows: int) -> int:
    """Return the place of row 0's last token, behind all drafts."""
    return aligned(num_rows * k)


@dataclass(frozen=True)
class References:
    """The names of one rank's latest tokens.

    Attributes:
        first: the least of them.
        k: drafts of each row.
        num_rows: on the device.
    """

    first: int
    k: int
    num_rows: int

    def draft(self, rows: IntArray, index: IntArray) -> IntArray:
        """Name drafts, [n] each: the ``index``-th of k of a row."""
        return self.first + rows * self.k + index

    def last(self, rows: IntArray) -> IntArray:
        """Name the last tokens of rows, [n], where there are drafts."""
        return self.first + first_last(self.k, self.num_rows) + rows

    def sample(self, index: IntArray) -> IntArray:
        """Name what the last step sampled, [n], where there are no drafts."""
        return self.first + index
