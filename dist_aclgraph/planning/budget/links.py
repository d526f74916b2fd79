"""The streams that links of HIXL take from graphs."""

from __future__ import annotations

from dist_aclgraph.config import Config
from dist_aclgraph.planning.budget.domains import streams_per_domain

MAX_LINKS = 8  # maximum number of links that a rank makes, and maximum number that it accepts


def reserved_streams(config: Config) -> int:
    """Return the number of streams of each rank that graphs must not use.

    Each end of a link is in a communication domain of two ranks, and the end that reads uses one
    more stream. The emulator counts in the same way; the number on hardware is not known.
    """
    reserved = config.graph.reserve_streams
    if config.fetches_by_hixl:
        domain = streams_per_domain(config.device.expansion, 2)
        reserved += MAX_LINKS * (2 * domain + 1)
    return reserved
