"""Which graph a batch replays: one table, built from the committed plan.

The table's descriptors are the only valid graphs; a miss runs eagerly and is counted with its
reason.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from dist_aclgraph.graph.buckets import GraphFamily
from dist_aclgraph.graph.descriptor import BatchDescriptor
from dist_aclgraph.graph.plan import GraphPlan

MissReason = Literal["mode_none", "mixed", "prefill", "above_largest_bucket"]
Dispatch = tuple[BatchDescriptor | None, MissReason | None]
Table = list[BatchDescriptor | None]  # by token count; index 0 is never asked for


class GraphDispatcher:
    """Owns the tables and their counters. Knows nothing of devices or captured graphs."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.replays: Counter[BatchDescriptor] = Counter()
        self.padding: Counter[BatchDescriptor] = Counter()  # padded tokens
        self.misses: Counter[MissReason] = Counter()
        self.live_tokens = 0  # tokens of replayed batches, padding left out
        # FULL comes before PIECEWISE, and graphs for decoding alone before those for any batch.
        order = sorted(plan.families, key=lambda f: (f.run_mode != "FULL", f.query_len == 0))
        self._tables = [(family.query_len, self._table(family)) for family in order]

    def dispatch(self, num_tokens: int, num_reqs: int, query_len: int) -> Dispatch:
        """Return the graph that a batch replays, or None and why it runs eagerly.

        Args:
            num_tokens: tokens of the batch, at least one.
            num_reqs: requests of the batch.
            query_len: tokens of each request; 0 where they differ, or some are mid-prompt.
        """
        fits_kind = False
        for wanted, table in self._tables:
            if wanted and not (query_len == wanted and num_tokens == num_reqs * wanted):
                continue
            fits_kind = True
            if num_tokens < len(table):
                descriptor = table[num_tokens]
                assert descriptor is not None
                self.replays[descriptor] += 1
                self.live_tokens += num_tokens
                self.padding[descriptor] += descriptor.num_tokens - num_tokens
                return descriptor, None
        reason: MissReason = "mode_none"
        if self._tables:
            other: MissReason = "prefill" if query_len else "mixed"
            reason = "above_largest_bucket" if fits_kind else other
        self.misses[reason] += 1
        return None, reason

    def report(self) -> dict[str, Any]:
        """Return the counters: replays and padding by graph, misses by reason.

        For any thread: copies are taken at once, while the engine's thread may add keys.
        """
        replays, padding = dict(self.replays), dict(self.padding)
        return {
            "plan_version": self.plan.version,
            "replays": {str(graph): replays[graph] for graph in sorted(replays)},
            "misses": dict(sorted(dict(self.misses).items())),
            "live_tokens": self.live_tokens,
            "padded_tokens": sum(padding.values()),
            "padded_by_graph": {str(graph): padding[graph] for graph in sorted(padding)},
        }

    def _table(self, family: GraphFamily) -> Table:
        table: Table = [None]
        for bucket in family.buckets:
            descriptor = family.describe(bucket, self.plan.max_num_seqs)
            table += [descriptor] * (bucket + 1 - len(table))
        return table
