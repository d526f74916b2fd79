"""Chooses the graph that a batch replays, from tables of the graphs that exist on every rank.

If the tables contain no graph for a batch, the batch runs eagerly, and the reason is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from dist_aclgraph.planning.descriptor import BatchDescriptor, table_of
from dist_aclgraph.planning.lazy import LazyGraphs
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import Traffic

MissReason = Literal["mode_none", "mixed", "prefill", "above_largest_bucket", "cache_full"]
Dispatch = tuple[BatchDescriptor | None, MissReason | None]
Fits = Callable[[BatchDescriptor], bool]


def always(graph: BatchDescriptor) -> bool:
    """Accept any graph."""
    return True


class GraphDispatcher:
    """Owns the tables and their counters. This class knows nothing about devices or captured
    graphs.

    At first, the tables contain the graphs of the plan. While the group serves, ``add`` and
    ``remove`` change the tables.
    """

    def __init__(self, plan: GraphPlan, lazy: LazyGraphs | None = None) -> None:
        self.plan = plan
        self.lazy = lazy
        self.graphs = set(plan.capture_order)
        self.replays: Counter[BatchDescriptor] = Counter()
        self.padding: Counter[BatchDescriptor] = Counter()
        self.misses: Counter[MissReason] = Counter()
        self.live_tokens = 0  # number of tokens of replayed batches, without padding
        self._step = 0
        # The keys are numbers of tokens without padding. The value is the number of steps with this
        # number of tokens since the last call of ``take_traffic``.
        self._decode_seen: Counter[int] = Counter()
        self._mixed_seen: Counter[int] = Counter()
        self._make_tables()

    def dispatch(
        self, num_tokens: int, num_reqs: int, query_len: int, fits: Fits = always
    ) -> Dispatch:
        """Return the graph that a batch replays, or None and the reason why the batch runs eagerly.

        Args:
            num_tokens: number of tokens of the batch, at least one.
            num_reqs: number of requests of the batch.
            query_len: number of tokens of each request; 0 if requests have different numbers of
                tokens, or if a request is in the middle of its prompt.
            fits: takes a graph, and returns whether the batch may replay it. False, for example, if
                the KV cache has too few blocks for the graph's padding.
        """
        self._step += 1
        uniform = query_len if num_tokens == num_reqs * query_len else 0
        seen = self._decode_seen if uniform == self._decode_len else self._mixed_seen
        seen[num_tokens] += 1
        graph, reason = self._look_up(num_tokens, uniform, fits)
        if graph is not None:
            self.replays[graph] += 1
            self.live_tokens += num_tokens
            self.padding[graph] += graph.num_tokens - num_tokens
        elif reason is not None:
            self.misses[reason] += 1
        if self.lazy is not None:
            self.lazy.note(num_tokens, uniform, graph, self._step)
        return graph, reason

    def add(self, graph: BatchDescriptor) -> None:
        """Add a graph. Every rank must have captured the graph before this call."""
        self.graphs.add(graph)
        self._make_tables()

    def remove(self, graph: BatchDescriptor) -> None:
        """Remove a graph. Call this before the graph is released."""
        self.graphs.discard(graph)
        self._make_tables()

    def adopt(self, plan: GraphPlan) -> None:
        """Set the plan for the next steps. All graphs of the plan must exist. All other existing
        graphs must be lazy graphs.
        """
        self.plan = plan
        if self.lazy is not None:
            for graph in plan.capture_order:
                self.lazy.leave(graph)

    @property
    def step(self) -> int:
        """Number of dispatched steps."""
        return self._step

    def take_traffic(self) -> Traffic:
        """Return how many batches of each size ran since the last call.

        Any thread may call this. If another thread counts a step during this call, the step can get
        lost: no call returns the step.
        """
        decode, self._decode_seen = self._decode_seen, Counter()
        mixed, self._mixed_seen = self._mixed_seen, Counter()
        return Traffic(
            decode={n: float(count) for n, count in dict(decode).items()},
            mixed={n: float(count) for n, count in dict(mixed).items()},
        )

    def _look_up(self, num_tokens: int, query_len: int, fits: Fits) -> Dispatch:
        fits_kind, is_full = False, False
        for wanted, table in self._tables:
            if wanted not in (0, query_len):
                continue
            fits_kind = True
            if num_tokens < len(table):
                graph = table[num_tokens]
                if graph is not None and fits(graph):
                    return graph, None
                is_full = True
        if not self._tables:
            return None, "mode_none"
        if is_full:
            return None, "cache_full"
        if fits_kind:
            return None, "above_largest_bucket"
        return None, "prefill" if query_len else "mixed"

    def report(self) -> dict[str, Any]:
        """Return the counters: replays and padding tokens for each graph, and eager batches for
        each reason.

        Any thread may call this method while the engine's thread changes the counters. Each copy of
        a counter is atomic. The engine counts a replay before it counts the replay's padding. This
        method copies ``padding`` first, and ``replays`` second. So the copy of ``replays`` contains
        every graph that is in the copy of ``padding``.
        """
        padding, replays = dict(self.padding), dict(self.replays)
        return {
            "plan_version": self.plan.version,
            "replays": {str(graph): replays[graph] for graph in sorted(replays)},
            "misses": dict(sorted(dict(self.misses).items())),
            "live_tokens": self.live_tokens,
            "padded_tokens": sum(padding.values()),
            "padded_by_graph": {str(graph): padding[graph] for graph in sorted(padding)},
            "wasted_by_graph": {
                str(graph): padding[graph] / (replays[graph] * graph.num_tokens)
                for graph in sorted(padding)
            },
        }

    def _make_tables(self) -> None:
        """Make one table for each kind of graph. The tables are in the order in which they are
        searched.

        Tables of FULL graphs come before tables of PIECEWISE graphs. Among the tables of FULL
        graphs, the tables for decode batches come first.
        """
        kinds: dict[tuple[bool, bool, int], list[BatchDescriptor]] = {}
        for graph in sorted(self.graphs):
            kind = (graph.mode != "FULL", graph.query_len == 0, graph.query_len)
            kinds.setdefault(kind, []).append(graph)
        self._tables = [(kind[2], table_of(kinds[kind])) for kind in sorted(kinds)]
        self._decode_len = max((wanted for wanted, _ in self._tables), default=1) or 1
