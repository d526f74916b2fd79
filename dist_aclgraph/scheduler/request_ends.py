"""RequestEnds: finds out which running requests end at one of their new tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dist_aclgraph.scheduler.rank_step import NewTokens
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.rows import Indices, RunningRows
from dist_aclgraph.steps.delta import FinishReason


class RequestEnds:
    """Owns the stop token ids of the running requests of one rank."""

    def __init__(self) -> None:
        # for each stop token id, how many running requests end at this token
        self._stop_ids: Counter[int] = Counter()

    def add(self, request: Request) -> None:
        self._stop_ids.update(request.stop_ids)

    def remove(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._stop_ids.subtract(request.stop_ids)
        self._stop_ids = +self._stop_ids

    def has_stops(self, tokens: Sequence[int]) -> bool:
        """Return whether one of the tokens is a stop token of any running request."""
        return not self._stop_ids.keys().isdisjoint(tokens)

    def cut(
        self, rows: RunningRows, sampled: Indices, new: NewTokens, *, is_quiet: bool
    ) -> tuple[NewTokens, dict[int, FinishReason]]:
        """Find the requests that finish, and remove the tokens after their ends.

        Args:
            sampled: [num_samples], index of each sampled request; ``new`` contains their new
                tokens.
            is_quiet: if true, no request can reach its maximum length.

        Returns:
            The tokens that requests get, and the finish reasons of finished requests; the keys of
            the reasons are indices in ``sampled``.
        """
        tokens: list[int] = new.token_ids.tolist()
        has_stops = self.has_stops(tokens)
        if is_quiet and not has_stops:
            return new, {}
        known, limit = rows.received[sampled], rows.limit[sampled]
        counts = np.ones(len(known), np.int32) if new.counts is None else new.counts
        may_end = known + counts >= limit
        if has_stops:
            stops = np.isin(new.token_ids, list(self._stop_ids))
            may_end |= np.bincount(np.repeat(np.arange(len(counts)), counts), stops) > 0
        if not may_end.any():
            return new, {}
        requests = rows.select(sampled)
        reasons: dict[int, FinishReason] = {}
        kept = counts.copy()
        ends = np.cumsum(counts)
        for index in np.flatnonzero(may_end).tolist():
            request, room = requests[index], int(limit[index] - known[index])
            end = int(ends[index])
            count = request.num_until_stop(
                int(known[index]), tokens[end - int(counts[index]) : end][:room]
            )
            if count is not None:
                reasons[index], kept[index] = "stop", count
            elif counts[index] >= room:
                reasons[index], kept[index] = "length", room
        return new if new.counts is None else new.cut(kept), reasons
