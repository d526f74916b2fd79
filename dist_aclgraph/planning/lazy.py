"""Lazy graphs: graphs for shapes that are not in the plan, but are frequent enough to be captured.

This module only decides. Its LRU list contains a few shapes with the largest expected savings.
The caller reports the result of each decision: a shape enters the list after every rank has
captured it; a shape whose capture failed is not tried again for some time. Savings are counted in
tokens: all tokens of an eager step, and the avoidable padding of a step that replayed a larger
graph than necessary.
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
    """The decision to capture ``graph``, after the release of ``victim`` if it is not None."""

    graph: BatchDescriptor
    victim: BatchDescriptor | None = None


class LazyGraphs:
    """Owns the LRU list, and the possible savings of other shapes.

    Args:
        families: kinds and sizes that may be captured lazily.
        capacity: maximum number of lazy graphs at the same time.
        min_tokens: a graph is captured after it could have saved this number of tokens.
        retry_steps: number of steps for which a failed shape is not tried again.
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
        # For each shape, the number of tokens that its graph would have saved so far.
        self._wasted: Counter[BatchDescriptor] = Counter()
        # Number of the step in which each shape failed last.
        self._failed: dict[BatchDescriptor, int] = {}
        self._evicted: Counter[BatchDescriptor] = Counter()
        self.has_change = False  # whether ``next_change`` would return a change now

    @classmethod
    def from_config(cls, config: Config, capacity: int) -> LazyGraphs | None:
        """Return the configured policy for up to ``capacity`` graphs; None if ``capacity`` is 0."""
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
        """The existing lazy graphs, least recently used first."""
        return tuple(self._used)

    def note(
        self, num_tokens: int, query_len: int, replayed: BatchDescriptor | None, step: int
    ) -> None:
        """Record the graph that a step has used, and the tokens that a better graph would save."""
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
        """Return the decision to capture the shape with the largest savings, and reset these
        savings; None if no shape could have saved enough.
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
        # The necessary savings of a shape double after each eviction, so that shapes do not evict
        # each other again and again.
        return self._wasted[shape] >= self._min_tokens << min(self._evicted[shape], MAX_DOUBLINGS)

    def enter(self, graph: BatchDescriptor) -> None:
        """Record that every rank has captured the graph."""
        self._used[graph] = None

    def leave(self, graph: BatchDescriptor) -> None:
        """Remove the graph from the lazy graphs, because it was released, or because the plan
        contains it now.
        """
        self._used.pop(graph, None)
        self._wasted.pop(graph, None)
        self.has_change = any(map(self._pays, self._wasted))

    def fail(self, graph: BatchDescriptor, step: int) -> None:
        """Record that the graph could not be captured."""
        self._failed[graph] = step

    def _shape_of(self, num_tokens: int, query_len: int) -> BatchDescriptor | None:
        for wanted, table in self._tables:
            if wanted in (0, query_len) and num_tokens < len(table):
                return table[num_tokens]
        return None
