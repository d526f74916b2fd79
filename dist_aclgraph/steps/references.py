"""How a step names tokens that the host does not have: by negative ids.

What the last step sampled, and the drafts of all rows, lie in one array of int32 on the device, the
*latest tokens*; id -1 - i names place i of it. Without drafts they are the samples in the order of
the last step's batch. With drafts, which live longer, they stand by row: k drafts of each, then
the last token of each.
"""

from __future__ import annotations

from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import aligned


def draft_reference(rows: IntArray, index: IntArray, k: int) -> IntArray:
    """Name drafts, [n] each: the ``index``-th of k of a row."""
    return -1 - (rows * k + index)


def last_reference(rows: IntArray, k: int, num_rows: int) -> IntArray:
    """Name the last tokens of rows, [n], where there are k > 0 drafts.

    Args:
        num_rows: on the device.
    """
    return -1 - (first_last(k, num_rows) + rows)


def first_last(k: int, num_rows: int) -> int:
    """Return the place of row 0's last token, behind all drafts."""
    return aligned(num_rows * k)


def sample_reference(index: IntArray) -> IntArray:
    """Name what the last step sampled, [n], where there are no drafts."""
    return -1 - index
