"""The frequency of each batch size, for which buckets are chosen.

Engines count the batches; this module evaluates the counts. All functions are pure, and the clock
is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dist_aclgraph.config import GraphConfig
from dist_aclgraph.planning.buckets import GraphFamily

PRIOR_SHARE = 0.02  # share of the weight for unseen sizes, so that they keep a bucket


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Weights by live tokens, without padding; a new step has the weight one.

    Attributes:
        decode: batches in which every request has the same few tokens.
        mixed: all others.
    """

    decode: dict[int, float] = {}
    mixed: dict[int, float] = {}

    @classmethod
    def from_config(cls, config: GraphConfig) -> Traffic:
        """Return the expected traffic of the configuration; empty if it has none."""
        return cls(decode=dict(config.traffic or {}), mixed=dict(config.mixed_traffic or {}))

    @property
    def weight(self) -> float:
        """Weight of all steps, with decay."""
        return sum(self.decode.values()) + sum(self.mixed.values())


def fade(traffic: Traffic, elapsed: float, half_life: float) -> Traffic:
    """Return the traffic after ``elapsed``; half of its weight remains after each ``half_life``.

    Both are seconds, or both steps.
    """
    share = 0.5 ** (elapsed / half_life)
    return Traffic(
        decode={tokens: weight * share for tokens, weight in traffic.decode.items()},
        mixed={tokens: weight * share for tokens, weight in traffic.mixed.items()},
    )


def merge(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of several groups' traffic, or of old and new traffic."""
    decode: Counter[int] = Counter()
    mixed: Counter[int] = Counter()
    for part in parts:
        decode.update(part.decode)
        mixed.update(part.mixed)
    return Traffic(decode=dict(sorted(decode.items())), mixed=dict(sorted(mixed.items())))


def prior(largest: int, unit: int = 1) -> dict[int, float]:
    """Return the weights for unknown traffic: 1/n, so small sizes have most of the weight.

    ``unit`` is the query length: batches are multiples of it.
    """
    return {tokens: 1.0 / tokens for tokens in range(unit, largest + 1, unit)}


def weights_of(
    traffic: Traffic | None, families: Sequence[GraphFamily]
) -> tuple[dict[int, float], ...]:
    """Return for each family the weights of the batches that it would replay.

    Decode batches count for the family for decoding alone, up to its largest bucket. All other
    batches count for the family that accepts any batch. A family without observed traffic gets the
    prior, and any other family a small share of the prior.
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
    """Owns the observed traffic, with decay, and the time of the last update.

    Args:
        now_s: a clock's time, in seconds, as in all methods.
    """

    def __init__(self, config: GraphConfig, now_s: float) -> None:
        self._config = config
        self._traffic = Traffic()
        self._looked_s = now_s

    @property
    def next_look_s(self) -> float:
        """Time until the next update is due; infinity if never."""
        return self._looked_s + (self._config.rebucket_s or math.inf)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_look_s

    def record(self, seen: Sequence[Traffic], now_s: float) -> Traffic:
        """Add the traffic since the last update; return all of it."""
        faded = fade(self._traffic, now_s - self._looked_s, self._config.traffic_half_life_s)
        self._looked_s = now_s
        self._traffic = merge([faded, *seen])
        return self._traffic
