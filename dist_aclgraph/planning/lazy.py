"""Lazy graphs: graphs that are not in the plan, but whose shapes occur so often that they are
captured later.

This module only decides; its caller captures and releases graphs, and reports the result of each
decision. The module has an LRU list of a few shapes with large expected savings. A shape enters the
list after every rank has captured it. A shape whose capture failed is not tried again for some
time. Savings are counted in tokens. For an eager step, the savings are all tokens of the step. For
a step that replayed a larger graph than necessary, the savings are the padding tokens that a
smaller graph would avoid.
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
    """The decision to capture ``graph``. If ``victim`` is not None, the graph ``victim`` must be
    released first.
    """

    graph: BatchDescriptor
    victim: BatchDescriptor | None = None


class LazyGraphs:
    """Owns the LRU list, and the savings of each shape: the number of tokens that a graph of this
    shape would have saved.

    Args:
        families: the kinds and sizes of graphs that may be captured lazily.
        capacity: maximum number of lazy graphs at the same time.
        min_tokens: minimum savings, in tokens, for which a shape is captured.
        retry_steps: number of steps during which a shape whose capture has failed is not tried
            again.
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
        # For each shape, how many tokens its graph would have saved until now.
        self._wasted: Counter[BatchDescriptor] = Counter()
        # For each shape, the number of the step at which its capture failed last.
        self._failed: dict[BatchDescriptor, int] = {}
        self._evicted: Counter[BatchDescriptor] = Counter()
        self.has_change = False  # whether ``next_change`` would return a change now

    @classmethod
    def from_config(cls, config: Config, capacity: int) -> LazyGraphs | None:
        """Return the policy that the configuration describes, for up to ``capacity`` graphs; None
        if ``capacity`` is 0.
        """
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
        """The existing lazy graphs; the least recently used graph comes first."""
        return tuple(self._used)

    def note(
        self, num_tokens: int, query_len: int, replayed: BatchDescriptor | None, step: int
    ) -> None:
        """Record which graph a step has replayed, and how many tokens a better graph would have
        saved.
        """
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
        """Return the decision to capture the shape that could have saved the most tokens, and reset
        its savings. Return None if no shape could have saved enough.
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
        # Each eviction of a shape doubles the savings that the shape needs before it is captured
        # again. Otherwise, shapes could evict each other again and again.
        return self._wasted[shape] >= self._min_tokens << min(self._evicted[shape], MAX_DOUBLINGS)

    def enter(self, graph: BatchDescriptor) -> None:
        """Record that every rank has captured the graph."""
        self._used[graph] = None

    def leave(self, graph: BatchDescriptor) -> None:
        """Remove the graph from the LRU list, because it was released, or because it is part of the
        plan now.
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
