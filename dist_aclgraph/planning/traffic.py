"""The frequency of each batch size. Buckets are chosen for these frequencies.

Engines count batches, and this module evaluates the counts. All functions are pure; the time is an
argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dist_aclgraph.config import GraphConfig
from dist_aclgraph.planning.buckets import GraphFamily

# The weight of the assumed traffic (``prior``), divided by the weight of the observed traffic.
# Because of this weight, a size without observed traffic can also get a bucket.
PRIOR_SHARE = 0.02


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The weight of each batch size. A batch size is a number of live tokens, without padding. A
    new step has the weight 1.

    Attributes:
        decode: the weights of batches in which every request decodes the same number of tokens.
        mixed: the weights of all other batches.
    """

    decode: dict[int, float] = {}
    mixed: dict[int, float] = {}

    @classmethod
    def from_config(cls, config: GraphConfig) -> Traffic:
        """Return the expected traffic from the configuration; empty if the configuration contains
        no traffic.
        """
        return cls(decode=dict(config.traffic or {}), mixed=dict(config.mixed_traffic or {}))

    @property
    def weight(self) -> float:
        """Sum of the present weights of all steps."""
        return sum(self.decode.values()) + sum(self.mixed.values())


def fade(traffic: Traffic, elapsed: float, half_life: float) -> Traffic:
    """Return the traffic after the time ``elapsed``. All weights are halved once in each half-life.

    ``elapsed`` and ``half_life`` must have the same unit, seconds or steps.
    """
    share = 0.5 ** (elapsed / half_life)
    return Traffic(
        decode={tokens: weight * share for tokens, weight in traffic.decode.items()},
        mixed={tokens: weight * share for tokens, weight in traffic.mixed.items()},
    )


def merge(parts: Iterable[Traffic]) -> Traffic:
    """Return traffic in which each weight is the sum of the weights in ``parts``."""
    decode: Counter[int] = Counter()
    mixed: Counter[int] = Counter()
    for part in parts:
        decode.update(part.decode)
        mixed.update(part.mixed)
    return Traffic(decode=dict(sorted(decode.items())), mixed=dict(sorted(mixed.items())))


def prior(largest: int, unit: int = 1) -> dict[int, float]:
    """Return the weights that are assumed as long as the traffic is unknown. A batch of n tokens
    has the weight 1/n, so small sizes have most of the weight.

    Args:
        unit: number of tokens of each request; batch sizes are multiples of this number.
    """
    return {tokens: 1.0 / tokens for tokens in range(unit, largest + 1, unit)}


def weights_of(
    traffic: Traffic | None, families: Sequence[GraphFamily]
) -> tuple[dict[int, float], ...]:
    """Return, for each family, the weights of the batches that would replay the family's graphs.

    Decode batches up to the largest decode bucket belong to the family for decode batches. All
    other batches belong to the family that accepts any batch. If a family has no observed traffic,
    ``prior`` computes its weights. Otherwise, a small fraction of the weights of ``prior`` is added
    to the observed weights.
    """
    traffic = traffic or Traffic()
    reach = max((f.buckets[-1] for f in families if f.query_len and f.buckets), default=0)
    own = {n: weight for n, weight in traffic.decode.items() if n <= reach}
    rest = {n: weight for n, weight in traffic.decode.items() if n > reach}
    mixed = merge([Traffic(mixed=traffic.mixed), Traffic(mixed=rest)]).mixed
    return tuple(_with_prior(own if family.query_len else mixed, family) for family in families)


def _with_prior(seen: Mapping[int, float], family: GraphFamily) -> dict[int, float]:
    if not family.buckets:
        return dict(seen)
    unseen = prior(family.buckets[-1], family.query_len or 1)
    total = sum(seen.values())
    if not total:
        return unseen
    share = PRIOR_SHARE * total / sum(unseen.values())
    return {
        tokens: seen.get(tokens, 0.0) + share * unseen.get(tokens, 0.0)
        for tokens in sorted({*seen, *unseen})
    }


class TrafficHistory:
    """Owns the observed traffic, in which older steps count less, and the time of the last update.

    Args:
        now_s: time in seconds; all methods must use the same clock.
    """

    def __init__(self, config: GraphConfig, now_s: float) -> None:
        self._config = config
        self._traffic = Traffic()
        self._looked_s = now_s

    @property
    def next_look_s(self) -> float:
        """The time at which the next update is due; infinity if no update will follow."""
        return self._looked_s + (self._config.rebucket_s or math.inf)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_look_s

    def record(self, seen: Sequence[Traffic], now_s: float) -> Traffic:
        """Add ``seen``, the traffic since the last update. Return all traffic with its present
        weights.
        """
        faded = fade(self._traffic, now_s - self._looked_s, self._config.traffic_half_life_s)
        self._looked_s = now_s
        self._traffic = merge([faded, *seen])
        return self._traffic
