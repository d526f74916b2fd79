"""Computes the places from which drafting continues: the tokens after which a step samples. The
inputs are the values that the host knows before the step.

See ``device_step.DraftInputs``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.context.place import ContextPlace


@dataclass(frozen=True)
class DraftPlaces:
    """The values of ``DraftInputs``, as arrays on the host, for S sampled requests.

    Attributes:
        rows, most: [S], as in ``DraftInputs``.
        num_logits: [S], number of tokens that the step samples for each request.
        positions: [S, k + 1]; slots: [S, 3 k]; places: [S, k + 1], indices into the step's tokens.
        behind: [S], -1 if the host knows the positions of the request. Otherwise, the request's
            row; the device increases the positions by the row's number of accepted drafts.
    """

    rows: IntArray
    most: IntArray
    num_logits: IntArray
    positions: IntArray
    slots: IntArray
    places: IntArray
    behind: IntArray

    def moved(self, is_moved: npt.NDArray[np.bool_]) -> DraftPlaces:
        """Return a copy with a new ``behind``: the request's row if ``is_moved``, [S], is true for
        the request; otherwise -1.
        """
        return replace(self, behind=np.where(is_moved, self.rows, -1).astype(np.int32))


def draft_places(
    records: IntArray,
    k: int,
    block_table: IntArray,
    place: ContextPlace,
    may_draft: npt.NDArray[np.bool_],
) -> DraftPlaces:
    """Compute, for a batch, the places from which drafting continues.

    Args:
        records: [num_reqs, 4], for each request: row, num_computed_tokens, num_scheduled_tokens,
            num_logits.
        block_table: [max_rows, max_blocks].
        place: the indices of a rank in context parallelism. Slots are computed for this rank.
        may_draft: [max_rows], whether drafts of a row may be accepted.
    """
    query_ends = np.cumsum(records[:, 2], dtype=np.int32)
    is_sampled = records[:, 3] > 0
    rows, computed, scheduled, num_logits = records[is_sampled].T
    ends = query_ends[is_sampled]
    index = np.arange(k + 1, dtype=np.int32)
    first = computed + scheduled - num_logits
    at = first[:, None] + np.arange(3 * k, dtype=np.int32)
    return DraftPlaces(
        rows=rows,
        most=np.where(may_draft[rows], num_logits - 1, 0).astype(np.int32),
        num_logits=num_logits,
        positions=first[:, None] + index,
        slots=place.shards.slots_of(place.shard, block_table, rows[:, None], at),
        places=(ends - num_logits)[:, None] + np.minimum(index, num_logits[:, None] - 1),
        behind=np.full(len(rows), -1, np.int32),
    )
