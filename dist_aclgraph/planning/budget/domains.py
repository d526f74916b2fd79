"""The number of streams that a communication domain costs. This number comes from public notes, not
from measurements.

The notes are vllm-ascend's stream formulas and their comments.
"""

from __future__ import annotations

from dist_aclgraph.config import HcclExpansion

MOST_AICPU_RANKS = 16


def streams_per_domain(expansion: HcclExpansion, num_ranks: int) -> int:
    """Return the number of streams that a domain uses in total, however many graphs there are.

    With AIV, a domain uses one stream. With FFTS, a domain uses two streams; vllm-ascend's formulas
    also count them per domain. AICPU uses one stream for each other rank of the domain. A domain
    with more than sixteen ranks is counted as a domain with sixteen ranks. For AICPU, vllm-ascend's
    comments describe this number as the worst case ("per domain on the device (worst case)").
    """
    if expansion == "AICPU":
        return max(1, min(num_ranks, MOST_AICPU_RANKS) - 1)
    return streams_per_graph(expansion)


def streams_per_graph(expansion: HcclExpansion) -> int:
    """Return the number of streams that a captured graph needs for each domain that it uses.

    The formulas count one stream for each group with AIV, and two streams for each group with FFTS
    or AICPU.
    """
    return 1 if expansion == "AIV" else 2
