"""Counts the steps of a simulation for each period of time, and for each batch size. The dispatcher
has no such counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import Dispatch, Fits, GraphDispatcher, always

MAX_BINS = 128  # maximum number of bins; if more would be needed, all bins become twice as wide
FIRST_WIDTH_S = 1.0


@dataclass
class Shares:
    """Counts of steps and of the tokens in these steps."""

    steps: int = 0
    eager_steps: int = 0
    live_tokens: int = 0
    eager_tokens: int = 0
    padded_tokens: int = 0

    def add(self, num_tokens: int, graph: BatchDescriptor | None, times: int = 1) -> None:
        """Count a step, or several equal steps."""
        self.steps += times
        self.live_tokens += num_tokens * times
        if graph is None:
            self.eager_steps += times
            self.eager_tokens += num_tokens * times
        else:
            self.padded_tokens += (graph.num_tokens - num_tokens) * times

    def merge(self, other: Shares, times: int = 1) -> None:
        self.steps += other.steps * times
        self.eager_steps += other.eager_steps * times
        self.live_tokens += other.live_tokens * times
        self.eager_tokens += other.eager_tokens * times
        self.padded_tokens += other.padded_tokens * times

    @property
    def padding_share(self) -> float:
        """Fraction of all tokens in replayed graphs that are padding."""
        replayed = self.live_tokens - self.eager_tokens + self.padded_tokens
        return self.padded_tokens / replayed if replayed else 0.0

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "live_tokens": self.live_tokens,
            "padded_tokens": self.padded_tokens,
            "padding_share": self.padding_share,
            "eager_step_share": self.eager_steps / self.steps if self.steps else 0.0,
            "eager_token_share": self.eager_tokens / self.live_tokens if self.live_tokens else 0.0,
        }


class TimeLine:
    """Counts over time, in at most ``MAX_BINS`` bins of equal width."""

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.bins: dict[int, Shares] = {}

    def add(self, at_s: float, num_tokens: int, graph: BatchDescriptor | None) -> None:
        index = int(at_s / self.width_s)
        while index >= MAX_BINS:
            self._widen()
            index = int(at_s / self.width_s)
        found = self.bins.get(index)
        if found is None:
            found = self.bins[index] = Shares()
        found.add(num_tokens, graph)

    def report(self) -> list[dict[str, Any]]:
        """Return the bins that contain at least one step, each with the time at which it begins, in
        seconds.
        """
        return [
            {"from_s": index * self.width_s, **self.bins[index].report()}
            for index in sorted(self.bins)
        ]

    def _widen(self) -> None:
        self.width_s *= 2
        merged: dict[int, Shares] = {}
        for index, shares in self.bins.items():
            merged.setdefault(index // 2, Shares()).merge(shares)
        self.bins = merged


@dataclass
class Tally:
    """Counts the steps of a group in two tables. One table has a row for each period of time, the
    other has a row for each kind of batch. The kind of a batch is its number of tokens without
    padding, and its query length.

    The query length is the number of tokens of each request in the batch; 0 if this number differs
    between requests.
    """

    over_time: TimeLine = field(default_factory=TimeLine)
    by_batch: dict[tuple[int, int], Shares] = field(default_factory=dict)

    def add(self, at_s: float, step: LastStep) -> None:
        self.over_time.add(at_s, step.num_tokens, step.graph)
        key = step.num_tokens, step.query_len
        found = self.by_batch.get(key)
        if found is None:
            found = self.by_batch[key] = Shares()
        found.add(step.num_tokens, step.graph)

    @property
    def all(self) -> Shares:
        found = Shares()
        for shares in self.by_batch.values():
            found.merge(shares)
        return found

    def by_tokens(self) -> list[dict[str, Any]]:
        """Return the counts for each batch size, in ascending order. The batch size is the number
        of live tokens: tokens that are not padding.
        """
        found: dict[int, Shares] = {}
        for (num_tokens, _), shares in self.by_batch.items():
            found.setdefault(num_tokens, Shares()).merge(shares)
        return [{"tokens": n, **found[n].report()} for n in sorted(found)]


@dataclass(frozen=True)
class LastStep:
    """The arguments of the last call of the dispatcher, and the graph that this call returned."""

    num_tokens: int
    query_len: int
    graph: BatchDescriptor | None


class WatchedDispatcher(GraphDispatcher):
    """A dispatcher that stores the arguments and the result of its last call."""

    last: LastStep

    def dispatch(
        self, num_tokens: int, num_reqs: int, query_len: int, fits: Fits = always
    ) -> Dispatch:
        graph, reason = super().dispatch(num_tokens, num_reqs, query_len, fits)
        uniform = query_len if num_tokens == num_reqs * query_len else 0
        self.last = LastStep(num_tokens, uniform, graph)
        return graph, reason


def replay_batches(
    by_batch: Mapping[tuple[int, int], Shares], dispatcher: GraphDispatcher
) -> Shares:
    """Dispatch the same batches with another set of graphs, and return the counts."""
    found = Shares()
    for (num_tokens, query_len), shares in by_batch.items():
        num_reqs = num_tokens // query_len if query_len else 1
        graph, _ = dispatcher.dispatch(num_tokens, num_reqs, query_len)
        found.add(num_tokens, graph, shares.steps)
    return found
