"""The cost of a communication domain in streams. A reading of public notes, never measured.

The notes are vllm-ascend's stream formulas and the comments beside them.
"""

from __future__ import annotations

from dist_aclgraph.config import HcclExpansion

MOST_AICPU_RANKS = 16


def streams_per_domain(expansion: HcclExpansion, num_ranks: int) -> int:
    """Return the streams that a domain holds, however many graphs use it.

    AIV and FFTS: one and two, as the formulas count for a group. AICPU: the comments name a stream
    for each other rank, of at most sixteen ranks, "per domain on the device (worst case)".
    """
    if expansion == "AICPU":
        return max(1, min(num_ranks, MOST_AICPU_RANKS) - 1)
    return streams_per_graph(expansion)


def streams_per_graph(expansion: HcclExpansion) -> int:
    """Return the streams that each captured graph takes for a domain that it uses.

    The formulas count one for a group with AIV, and two with FFTS and AICPU alike.
    """
    return 1 if expansion == "AIV" else 2
