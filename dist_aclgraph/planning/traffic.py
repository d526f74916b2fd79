"""How often batches of each size run: what buckets are chosen for.

Whoever sees the batches counts them; here is what becomes of the counts. All functions are pure,
and the clock is an argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dist_aclgraph.config import GraphConfig
from dist_aclgraph.planning.buckets import GraphFamily

PRIOR_SHARE = 0.02  # of the weight, on sizes not seen yet, so that they keep a bucket


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Weights by live tokens, padding left out; a new step weighs one.

    Attributes:
        decode: batches in which every request has the same few tokens.
        mixed: all others.
    """

    decode: dict[int, float] = {}
    mixed: dict[int, float] = {}

    @classmethod
    def from_config(cls, config: GraphConfig) -> Traffic:
        """Return what the configuration expects; empty where it says nothing."""
        return cls(decode=dict(config.traffic or {}), mixed=dict(config.mixed_traffic or {}))

    @property
    def weight(self) -> float:
        """All steps seen, the old ones faded."""
        return sum(self.decode.values()) + sum(self.mixed.values())


def fade(traffic: Traffic, elapsed: float, half_life: float) -> Traffic:
    """Return the traffic as it counts ``elapsed`` later; half of it after each ``half_life``.

    Both are seconds, or both steps.
    """
    share = 0.5 ** (elapsed / half_life)
    return Traffic(
        decode={tokens: weight * share for tokens, weight in traffic.decode.items()},
        mixed={tokens: weight * share for tokens, weight in traffic.mixed.items()},
    )


def merge(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of several groups' traffic, or of an old one and what came since."""
    decode: Counter[int] = Counter()
    mixed: Counter[int] = Counter()
    for part in parts:
        decode.update(part.decode)
        mixed.update(part.mixed)
    return Traffic(decode=dict(sorted(decode.items())), mixed=dict(sorted(mixed.items())))


def prior(largest: int, unit: int = 1) -> dict[int, float]:
    """Return the weights of traffic that nobody has seen: 1/n, so that small sizes lie dense.

    ``unit`` is the query length: batches are multiples of it.
    """
    return {tokens: 1.0 / tokens for tokens in range(unit, largest + 1, unit)}


def weights_of(
    traffic: Traffic | None, families: Sequence[GraphFamily]
) -> tuple[dict[int, float], ...]:
    """Return for each family the weights of the batches that it would replay.

    Decode batches go to the family that is theirs alone, as far as its largest bucket reaches; all
    else goes to the family that takes any batch. A family that nothing was seen of gets the prior,
    and any other a small share of it.
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
    """Owns the traffic that was seen, old steps faded, and when it was looked at last.

    Args:
        now_s: a clock's time, in seconds, as in all methods.
    """

    def __init__(self, config: GraphConfig, now_s: float) -> None:
        self._config = config
        self._traffic = Traffic()
        self._looked_s = now_s

    @property
    def next_look_s(self) -> float:
        """When it is time to look at the traffic again; never is infinity."""
        return self._looked_s + (self._config.rebucket_s or math.inf)

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_look_s

    def take(self, seen: Sequence[Traffic], now_s: float) -> Traffic:
        """Add what was seen since the last time; return all of it."""
        faded = fade(self._traffic, now_s - self._looked_s, self._config.traffic_half_life_s)
        self._looked_s = now_s
        self._traffic = merge([faded, *seen])
        return self._traffic
