"""Which graph a batch replays: one table, built from the committed plan.

The table's descriptors are the only valid graphs; a miss runs eagerly and is counted with its
reason.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from dist_aclgraph.graph.buckets import BatchDescriptor, pad_to_bucket
from dist_aclgraph.graph.plan import GraphPlan
from dist_aclgraph.scheduler.step import RunMode

MissReason = Literal["mode_none", "mixed", "prefill", "above_largest_bucket"]
Dispatch = tuple[RunMode, BatchDescriptor | None, MissReason | None]

DECODE_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
PIECEWISE_MODES = ("PIECEWISE", "FULL_AND_PIECEWISE")


class GraphDispatcher:
    """Owns the table and its counters. Knows nothing of devices or captured graphs."""

    def __init__(self, plan: GraphPlan) -> None:
        self.plan = plan
        self.replays: Counter[BatchDescriptor] = Counter()
        self.misses: Counter[MissReason] = Counter()
        self.padding: Counter[BatchDescriptor] = Counter()  # padded tokens
        self.live_tokens = 0  # tokens of replayed batches, padding left out
        self._decode = self._table("FULL") if plan.mode in DECODE_MODES else []
        self._any = self._table("PIECEWISE") if plan.mode in PIECEWISE_MODES else []

    @property
    def descriptors(self) -> list[BatchDescriptor]:
        """Every graph of the plan, piecewise first, each kind in capture order."""
        found = [d for table in (self._any, self._decode) for d in table if d is not None]
        return sorted(set(found), key=lambda d: (d.mode == "FULL", -d.num_tokens))

    def dispatch(self, num_tokens: int, num_reqs: int, query_len: int) -> Dispatch:
        """Return how a batch runs, the graph that it replays, and why if it replays none.

        Args:
            num_tokens: tokens of the batch, at least one.
            num_reqs: requests of the batch.
            query_len: tokens of each request; 0 where they differ, or some are mid-prompt.
        """
        is_decode = query_len == self.plan.query_len and num_tokens == num_reqs * query_len
        table = self._decode if is_decode and self._decode else self._any
        if num_tokens < len(table):
            descriptor = table[num_tokens]
            assert descriptor is not None
            self.replays[descriptor] += 1
            self.live_tokens += num_tokens
            self.padding[descriptor] += descriptor.num_tokens - num_tokens
            return descriptor.mode, descriptor, None
        reason = self._miss(table, is_decode, query_len)
        self.misses[reason] += 1
        return "NONE", None, reason

    def report(self) -> dict[str, Any]:
        """Return the counters: replays and padding by bucket, misses by reason.

        For any thread: copies are taken at once, while the engine's thread may add keys.
        """
        by_bucket: Counter[int] = Counter()
        for descriptor, count in dict(self.replays).items():
            by_bucket[descriptor.num_tokens] += count
        padded: Counter[int] = Counter()
        for descriptor, count in dict(self.padding).items():
            padded[descriptor.num_tokens] += count
        return {
            "plan_version": self.plan.version,
            "replays": dict(sorted(by_bucket.items())),
            "misses": dict(sorted(dict(self.misses).items())),
            "live_tokens": self.live_tokens,
            "padded_tokens": padded.total(),
            "padded_by_bucket": dict(sorted(padded.items())),
        }

    def _miss(
        self, table: list[BatchDescriptor | None], is_decode: bool, query_len: int
    ) -> MissReason:
        if not self._decode and not self._any:
            return "mode_none"
        if table or is_decode:
            return "above_largest_bucket"
        return "prefill" if query_len else "mixed"

    def _table(self, mode: RunMode) -> list[BatchDescriptor | None]:
        """Return a table from token count to descriptor; index 0 is never asked for."""
        table: list[BatchDescriptor | None] = []
        for num_tokens in range(1, self.plan.buckets[-1] + 1 if self.plan.buckets else 1):
            bucket = pad_to_bucket(num_tokens, self.plan.buckets)
            assert bucket is not None
            table.append(self._descriptor(bucket, mode))
        return [None, *table] if table else []

    def _descriptor(self, bucket: int, mode: RunMode) -> BatchDescriptor:
        if mode == "FULL":
            query_len = self.plan.query_len
            return BatchDescriptor(bucket, bucket // query_len, query_len, "FULL")
        # Pieces between attentions do not depend on requests: any batch of the size replays them.
        return BatchDescriptor(bucket, bucket, 0, mode)
