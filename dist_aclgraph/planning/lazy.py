"""Lazy graphs: shapes outside the plan that are frequent enough to pay for their own graph.

This module only decides. It keeps an LRU of a few shapes, chosen by their expected savings. The
caller reports the result of each decision: a shape enters after it was captured on every rank, and
a shape that failed is not tried again for a while. Work is counted in tokens: those of an eager
step, and the padding of a step that replayed a larger graph than necessary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dist_aclgraph.config import Config
from dist_aclgraph.planning.buckets import GraphFamily, lazy_families
from dist_aclgraph.planning.descriptor import BatchDescriptor, table_of

MAX_DOUBLINGS = 16


@dataclass(frozen=True)
class LazyChange:
    """Capture ``graph``; if there is no room for it, release ``victim`` first."""

    graph: BatchDescriptor
    victim: BatchDescriptor | None = None


class LazyGraphs:
    """Owns the LRU, and the possible savings of other shapes.

    Args:
        families: kinds and sizes that may be captured lazily.
        capacity: graphs that may exist at once.
        min_tokens: work that a shape must cost before it is captured.
        retry_steps: steps for which a failed shape is not tried again.
    """

    def __init__(
        self,
        families: tuple[GraphFamily, ...],
        max_num_seqs: int,
        *,
        capacity: int,
        min_tokens: int,
        retry_steps: int,
    ) -> None:
        self._tables = [
            (family.query_len, table_of(family.describe(b, max_num_seqs) for b in family.buckets))
            for family in families
        ]
        self._capacity = capacity
        self._min_tokens = min_tokens
        self._retry_steps = retry_steps
        self._used: dict[BatchDescriptor, None] = {}  # least recently used first
        self._wasted: Counter[BatchDescriptor] = Counter()  # tokens, by the shape that saves them
        self._failed: dict[BatchDescriptor, int] = {}  # step of the last failure
        self._evicted: Counter[BatchDescriptor] = Counter()
        self.has_change = False  # whether ``next_change`` would return a change

    @classmethod
    def from_config(cls, config: Config, capacity: int) -> LazyGraphs | None:
        """Return the configured policy, with room for ``capacity`` graphs; None if it is off."""
        if not capacity:
            return None
        return cls(
            lazy_families(config),
            config.scheduler.max_num_seqs,
            capacity=capacity,
            min_tokens=config.graph.lazy_min_tokens,
            retry_steps=config.graph.lazy_retry_steps,
        )

    @property
    def graphs(self) -> tuple[BatchDescriptor, ...]:
        """The graphs that exist, least recently used first."""
        return tuple(self._used)

    def note(
        self, num_tokens: int, query_len: int, replayed: BatchDescriptor | None, step: int
    ) -> None:
        """Count a step: the graph that its batch replayed, and the savings of its own graph."""
        if replayed is not None and replayed in self._used:
            self._used[replayed] = self._used.pop(replayed)
        shape = self._shape_of(num_tokens, query_len)
        if shape is None or shape == replayed:
            return
        saved = num_tokens if replayed is None else replayed.num_tokens - shape.num_tokens
        if saved <= 0 or step < self._failed.get(shape, -self._retry_steps) + self._retry_steps:
            return
        self._wasted[shape] += saved
        self.has_change |= self._pays(shape)

    def next_change(self) -> LazyChange | None:
        """Return the shape with the largest savings, if it is worth a capture, and reset its
        count.
        """
        if not self.has_change or not self._capacity:
            return None
        shape = max(filter(self._pays, self._wasted), key=self._wasted.__getitem__)
        del self._wasted[shape]
        self.has_change = any(map(self._pays, self._wasted))
        if len(self._used) < self._capacity:
            return LazyChange(shape)
        victim = next(iter(self._used))
        self._evicted[victim] += 1
        return LazyChange(shape, victim)

    def _pays(self, shape: BatchDescriptor) -> bool:
        # The price doubles after each eviction: more shapes than there is room for must not take
        # turns.
        return self._wasted[shape] >= self._min_tokens << min(self._evicted[shape], MAX_DOUBLINGS)

    def enter(self, graph: BatchDescriptor) -> None:
        """Note that every rank has captured the graph."""
        self._used[graph] = None

    def leave(self, graph: BatchDescriptor) -> None:
        """Note that the graph was released, or became part of the plan, which needs no lazy graph
        of it.
        """
        self._used.pop(graph, None)
        self._wasted.pop(graph, None)
        self.has_change = any(map(self._pays, self._wasted))

    def fail(self, graph: BatchDescriptor, step: int) -> None:
        """Note that the graph could not be captured."""
        self._failed[graph] = step

    def _shape_of(self, num_tokens: int, query_len: int) -> BatchDescriptor | None:
        for wanted, table in self._tables:
            if wanted in (0, query_len) and num_tokens < len(table):
                return table[num_tokens]
        return None
