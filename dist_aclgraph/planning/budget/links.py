"""The streams that links of HIXL take from graphs, and the host memory that they need."""

from __future__ import annotations

from dist_aclgraph.config import Config
from dist_aclgraph.planning.budget.domains import streams_per_domain

MAX_LINKS = 8  # maximum number of links that a rank makes, and maximum number that it accepts
# Pinned host memory of a worker that fetches files, and the same again for files that it lends.
PART_BYTES = 256 << 20


def streams_of_links(config: Config) -> int:
    """Return the number of streams of a rank that its links use, at most.

    Each end of a link is in a communication domain of two ranks, and the end that reads uses one
    more stream. The emulator counts in the same way; the number on hardware is not known.
    """
    if not config.fetches_by_hixl:
        return 0
    return MAX_LINKS * (2 * streams_per_domain(config.device.expansion, 2) + 1)


def reserved_streams(config: Config) -> int:
    """Return the number of streams of each rank that graphs must not use."""
    return config.graph.reserve_streams + streams_of_links(config)
