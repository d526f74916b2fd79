"""Streams that a communication domain takes, by how HCCL expands collectives on the device."""

from __future__ import annotations

from typing import Literal

Expansion = Literal["AIV", "AICPU", "FFTS"]


def streams_per_domain(expansion: Expansion, num_ranks: int) -> int:
    """Return the streams that one domain of ``num_ranks`` adds to a graph that touches it."""
    return 2
