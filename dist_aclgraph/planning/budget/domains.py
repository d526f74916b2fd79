"""The cost of a communication domain in streams. A reading of public notes, never measured."""

from __future__ import annotations

from dist_aclgraph.config import HcclExpansion

MOST_AICPU_RANKS = 16


def streams_per_domain(expansion: HcclExpansion, num_ranks: int) -> int:
    """Return the streams that a domain holds; each captured graph that uses the domain takes as
    many.

    AIV and FFTS: one and two, as the historical formulas count for a group. AICPU: a stream for
    each other rank, of at most sixteen ranks.
    """
    if expansion == "AIV":
        return 1
    if expansion == "FFTS":
        return 2
    return max(1, min(num_ranks, MOST_AICPU_RANKS) - 1)
