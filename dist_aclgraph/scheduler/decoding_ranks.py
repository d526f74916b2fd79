"""Applies the results of a step to several ranks in one operation. On these ranks, every request
decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress

import numpy as np

from dist_aclgraph.scheduler.group_rows import GroupRows
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.rank import RankScheduler
from dist_aclgraph.scheduler.rank_step import NewTokens
from dist_aclgraph.scheduler.rows import Places


def land_decoding(
    rows: GroupRows, ranks: Sequence[RankScheduler], brought: Sequence[NewTokens]
) -> tuple[Sequence[RankScheduler], list[StepOutputs]]:
    """Apply the results of the oldest step in flight, on each rank on which every request decodes.

    Args:
        brought: the results of each rank.

    Returns:
        The ranks whose results were not applied, and the outputs of the ranks whose results were
        applied.
    """
    # If there is only one rank, this function applies no results. Operations on the columns of one
    # rank are faster than operations on the columns of all ranks.
    if len(ranks) == 1:
        return ranks, []
    found = [rank for rank, new in zip(ranks, brought, strict=True) if rank.only_decodes(new)]
    found = list(compress(found, rows.stay_below_limit(*_sizes(found))))
    if not found:
        return ranks, []
    indices, lens = _sizes(found)
    tokens = np.concatenate([brought[rank.index].token_ids for rank in found])
    landed = rows.land_tokens(indices, lens, tokens)
    margins = rows.least_margins(indices, lens)
    ends = np.cumsum(lens).tolist()
    for rank, start, end, margin, has_full in zip(
        found, [0, *ends], ends, margins, landed.has_full, strict=False
    ):
        rank.land(landed.appended[start:end], margin, has_full=has_full)
    requests = list(chain.from_iterable(rank.rows.requests for rank in found))
    is_other = np.ones(len(ranks), bool)
    is_other[indices] = False
    return list(compress(ranks, is_other.tolist())), [StepOutputs(requests, landed.keys, tokens)]


def _sizes(ranks: Sequence[RankScheduler]) -> tuple[Places, Places]:
    """Return two arrays: the index of each rank, and its number of running requests."""
    return (
        np.array([rank.index for rank in ranks], np.intp),
        np.array([rank.num_running for rank in ranks], np.intp),
    )
