"""What one rank can give to graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.descriptor import BatchDescriptor

ASCEND_950_PIECEWISE_SIZES = 4  # what its driver takes (vllm-ascend: MAX_CAPTURE_SIZES_FOR_950)
ANY_BYTES = 1 << 62


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What one bucket took on one rank when it was captured and released to find out."""

    graph: BatchDescriptor
    streams: int
    bytes: int
    replay_s: float = 0.0  # of one replay, not of its capture; 0 where it was not timed


class StreamOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank can give to graphs; it travels from worker to controller."""

    rank: int  # world rank
    available: int  # streams that the device still has
    counts_graphs: bool = True  # whether that number falls and rises with graphs
    reserve: int = 0  # of these, streams that no graph may take
    free_bytes: int = ANY_BYTES  # device memory that graphs may take
    device: str = ""  # name of the chip
    cann: str = ""  # version of CANN
    card: str = ""  # ranks that name the same card share its streams; "" shares with nobody
    taken: dict[str, int] = {}  # streams gone before the offer, by who took them
    max_sizes: int | None = None  # most piecewise buckets that the driver takes, if limited
    probes: tuple[Probe, ...] = ()

    @property
    def usable(self) -> int:
        return max(0, self.available - self.reserve)

    def with_probe(self, probe: Probe) -> StreamOffer:
        """Return the offer with one probe more."""
        return msgspec.structs.replace(self, probes=(*self.probes, probe))

    def probes_of(self, family: GraphFamily) -> tuple[Probe, ...]:
        """Return the probes of this kind of graph, the largest first."""
        found = [probe for probe in self.probes if family.is_kind_of(probe.graph)]
        return tuple(sorted(found, key=lambda probe: -probe.graph.num_tokens))


def max_piecewise_sizes(chip: str) -> int | None:
    """Return how many piecewise sizes the driver of a chip takes; None where any number."""
    return ASCEND_950_PIECEWISE_SIZES if "950" in chip else None


def share_cards(offers: Sequence[StreamOffer]) -> list[StreamOffer]:
    """Return the offers with the streams of a card divided by the ranks that are on it.

    Each of them sees all streams that are left. Every rank keeps its own reserve.
    """
    ranks = Counter(offer.card for offer in offers)
    return [
        msgspec.structs.replace(offer, available=offer.available // ranks[offer.card])
        if offer.card and ranks[offer.card] > 1
        else offer
        for offer in offers
    ]
