"""The resources that one rank can give to graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from dist_aclgraph.planning.buckets import GraphFamily
from dist_aclgraph.planning.descriptor import BatchDescriptor

ASCEND_950_PIECEWISE_SIZES = 4  # the driver's limit (vllm-ascend: MAX_CAPTURE_SIZES_FOR_950)
ANY_BYTES = 1 << 62


class BucketProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one bucket on one rank. The rank measures this cost by capturing and releasing
    the bucket.
    """

    graph: BatchDescriptor
    streams: int
    bytes: int
    replay_s: float = 0.0  # seconds of one replay; 0 if no replay was timed


class StreamOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that one rank can give to graphs.

    A worker sends its offer to the controller.
    """

    rank: int  # world rank
    available: int  # number of free streams of the device
    counts_graphs: bool = True  # whether captures and releases change ``available``
    reserve: int = 0  # number of the available streams that no graph may use
    free_bytes: int = ANY_BYTES  # device memory that graphs may use
    device: str = ""  # name of the chip
    cann: str = ""  # version of CANN
    card: str = ""  # name of the card if several ranks share the card's streams; otherwise ""
    taken: dict[str, int] = {}  # number of streams already in use; the keys name the users
    max_sizes: int | None = None  # maximum number of piecewise buckets; None means no limit
    probes: tuple[BucketProbe, ...] = ()

    @property
    def usable(self) -> int:
        return max(0, self.available - self.reserve)

    def with_probe(self, probe: BucketProbe) -> StreamOffer:
        return msgspec.structs.replace(self, probes=(*self.probes, probe))

    def probes_of(self, family: GraphFamily) -> tuple[BucketProbe, ...]:
        """Return the probes of graphs of this family's kind. The probe of the largest bucket comes
        first.
        """
        found = [probe for probe in self.probes if family.is_kind_of(probe.graph)]
        return tuple(sorted(found, key=lambda probe: -probe.graph.num_tokens))


def max_piecewise_sizes(chip: str) -> int | None:
    """Return how many piecewise buckets the driver of a chip allows; None means no limit."""
    return ASCEND_950_PIECEWISE_SIZES if "950" in chip else None


def share_cards(offers: Sequence[StreamOffer]) -> list[StreamOffer]:
    """Divide the streams of each card by the number of the card's ranks; return the changed offers.

    The division is necessary, because each rank has counted all free streams of its card.
    ``reserve`` is not divided, because each rank has its own reserve.
    """
    ranks = Counter(offer.card for offer in offers)
    return [
        msgspec.structs.replace(offer, available=offer.available // ranks[offer.card])
        if offer.card and ranks[offer.card] > 1
        else offer
        for offer in offers
    ]
