"""The streams and the host memory that HIXL's links use. Graphs cannot use these streams."""

from __future__ import annotations

from dist_aclgraph.config import Config
from dist_aclgraph.planning.budget.domains import streams_per_domain

MAX_LINKS = 8  # maximum number of links that a rank opens, and also of links that a rank accepts
# Bytes of pinned host memory for files that a worker fetches. A second part of the same size is for
# files that other workers fetch from this worker.
PART_BYTES = 256 << 20


def streams_of_links(config: Config) -> int:
    """Return the maximum number of streams that a rank's links use.

    Each end of a link belongs to a communication domain of two ranks. The end that reads uses one
    additional stream. The emulator counts the streams of links in the same way. The number of
    streams on an NPU is not known.
    """
    if not config.fetches_by_hixl:
        return 0
    return MAX_LINKS * (2 * streams_per_domain(config.device.expansion, 2) + 1)


def reserved_streams(config: Config) -> int:
    """Return how many of a rank's streams graphs must not use."""
    return config.graph.reserve_streams + streams_of_links(config)
