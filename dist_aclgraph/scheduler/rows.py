"""RunningRows: the requests that have a row on one data-parallel rank. The numbers that describe
these requests are stored as columns of integers.

The columns contain the values that change in every step. NumPy updates these columns without a
Python loop over requests.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.scheduler.request import Request

Places = npt.NDArray[np.intp]
Indices = Places | slice
EVERY = slice(None)

NUM_COLUMNS = 15
# Values of the column ``held`` of ``Columns``.
WAITS, TRIES = 1, 2
# Columns that change at the same time are next to each other, so that one operation changes all of
# them. When a step is decided, the columns from ``computed`` to ``slack`` change. When the tokens
# of the step arrive, the columns from ``flying`` to ``num_recent`` change.
TAKING_OFF, LANDING = slice(2, 6), slice(4, 8)


class StepChanges(NamedTuple):
    """The numbers that a step adds to the columns of a request that decodes.

    Attributes:
        taken_off: [4, 1], numbers added to the columns ``TAKING_OFF`` when the step is decided.
        landed: [4, 1], numbers added to the columns ``LANDING`` when the request gets one token.
    """

    taken_off: IntArray
    landed: IntArray

    @classmethod
    def of(cls, num_drafts: int) -> StepChanges:
        return cls(
            np.array([[1], [1], [1], [num_drafts]], np.int32),
            np.array([[-1], [-num_drafts], [1], [1]], np.int32),
        )


class Columns:
    """Gives names to the columns of integers that describe the running requests of one rank, or of
    several ranks.

    ``computed`` and ``known`` include the tokens of steps in flight, as if these steps accepted no
    drafts. When the steps end, accepted drafts increase both numbers, by at most ``slack``.

    Attributes: columns of int32, [num_requests] each, or [num_ranks, capacity] each.
        row: row of the request in the workers' batch.
        key: the attribute ``key`` of the request.
        computed: number of tokens whose KV is in the cache, or is written by steps in flight. This
            number grows up to ``known``.
        known: number of existing tokens, prompt and output together.
        flying: number of the ``computed`` tokens that are in steps in flight.
        slack: number of the request's drafts in steps in flight. All of these drafts may be
            accepted.
        received: number of the ``known`` tokens that the host has received.
        num_recent: number of tokens that ``settle`` will add to ``Request.tokens``.
        started: number of tokens that the request had when it got the row. All later tokens were
            sampled in this row.
        prompt_end: tokens before this position are computed in chunks. From this position on,
            existing tokens are computed again, one token in each step.
        limit: maximum length of prompt and output together.
        covered: number of tokens for which the request has blocks.
        next_full: value of ``computed`` at which the next block becomes full.
        can_verify: 1 if drafts of the request may be accepted, otherwise 0. For example, the value
            is 0 for a request with penalties, because the probability of a token would depend on
            the drafts before the token.
        held: ``WAITS`` while the request waits for its grammar and does not run. ``TRIES`` if the
            request runs one token in each step, because only a step's result shows whether the
            grammar is compiled. Otherwise 0.
    """

    def _name_columns(self, columns: IntArray) -> None:
        (
            self.row,
            self.key,
            self.computed,
            self.known,
            self.flying,
            self.slack,
            self.received,
            self.num_recent,
            self.started,
            self.prompt_end,
            self.limit,
            self.covered,
            self.next_full,
            self.can_verify,
            self.held,
        ) = columns

    @property
    def decodes(self) -> npt.NDArray[np.bool_]:
        """[num_requests]: true if the request has a sampled token and may get another token now."""
        is_open: npt.NDArray[np.bool_] = (
            (self.known > self.started) & (self.known < self.limit) & (self.held != WAITS)
        )
        return is_open

    def margins(self) -> IntArray:
        """Return how many tokens each request can get before it reaches its maximum length, fills a
        block or needs a new block.
        """
        full = np.minimum(self.covered, self.next_full - 1) - self.computed
        margins: IntArray = np.minimum(full, self.limit - 1 - self.known) - self.slack
        return margins


class RunningRows(Columns):
    """The columns of integers that describe the running requests of one rank. The requests are in
    the order in which they were admitted.

    Args:
        columns: [NUM_COLUMNS, capacity], this rank's part of the group's columns.
        recent: [capacity, window], the latest tokens of each request. After ``window`` new tokens
            of a request, ``settle`` must be called.
        num_drafts: number of drafts of a request that decodes.
    """

    def __init__(self, columns: IntArray, recent: IntArray, num_drafts: int = 0) -> None:
        self.requests: list[Request] = []
        self._columns = columns
        self._recent = recent
        self._index_of_row = np.zeros(len(recent), np.intp)
        self._changes = StepChanges.of(num_drafts)
        self._update_names()

    def _update_names(self) -> None:
        """Set each attribute to a view of its column, with one element for each present request."""
        self._name_columns(self._columns[:, : len(self.requests)])

    def __len__(self) -> int:
        return len(self.requests)

    # ---- requests

    def add(
        self, request: Request, *, computed: int, covered: int, next_full: int, prompt_end: int
    ) -> int:
        """Add a request that has a row and blocks; return the request's index, which is the highest
        index.
        """
        index = len(self.requests)
        num_tokens = len(request.tokens)
        self.requests.append(request)
        self._columns[:, index] = (
            request.row,
            request.key,
            computed,
            num_tokens,
            0,
            0,
            num_tokens,
            0,
            num_tokens,
            prompt_end,
            request.max_total_tokens,
            covered,
            next_full,
            not request.sampling.has_penalties,
            TRIES if request.tries_grammar else 0,
        )
        self._index_of_row[request.row] = index
        self._update_names()
        return index

    def index_of(self, request: Request) -> int:
        return int(self._index_of_row[request.row])

    def select(self, indices: Indices) -> list[Request]:
        if isinstance(indices, slice):
            return self.requests[indices]
        return list(map(self.requests.__getitem__, indices.tolist()))

    def remove(self, indices: list[int]) -> Places:
        """Move the recent tokens of requests to their token lists, and remove the requests. The
        requests after the removed requests get smaller indices.

        Returns:
            For each request that existed before, its new index; -1 if it was removed.
        """
        for index in indices:
            self.settle(index)
        num_kept = len(self.requests) - len(indices)
        keep = np.ones(len(self.requests), bool)
        keep[indices] = False
        self._columns[:, :num_kept] = self._columns[:, : len(self.requests)][:, keep]
        self.held[num_kept : len(self.requests)] = 0  # these elements belong to no request now
        self.requests = list(compress(self.requests, keep))
        self._update_names()
        self._index_of_row[self.row] = np.arange(num_kept)
        return np.where(keep, np.cumsum(keep) - 1, -1)

    # ---- steps

    def take_off(self, indices: Indices, records: IntArray) -> None:
        """Add the changes of a decided step to the columns, as if the step accepted no drafts.

        Args:
            records: [n, 4], for each request at ``indices``: row, num_computed_tokens,
                num_scheduled_tokens, num_logits.
        """
        drafts = np.maximum(records[:, 3] - 1, 0)
        grown = records[:, 2] - drafts
        self.computed[indices] += grown
        self.flying[indices] += grown
        self.known[indices] += records[:, 3] > 0
        self.slack[indices] += drafts

    def put_back(self, indices: Indices, records: IntArray) -> None:
        """Undo ``take_off`` for a step that is dropped. The arguments are the same as in the call
        of ``take_off``.
        """
        drafts = np.maximum(records[:, 3] - 1, 0)
        grown = records[:, 2] - drafts
        self.computed[indices] -= grown
        self.flying[indices] -= grown
        self.known[indices] -= records[:, 3] > 0
        self.slack[indices] -= drafts

    def land(self, indices: Indices, records: IntArray, passed: IntArray | None) -> None:
        """Update the columns for a step that has ended, and whose accepted drafts are known.

        Args:
            indices, records: the arguments with which ``take_off`` was called for this step.
            passed: [n], number of accepted drafts of each request; None means 0 for each.
        """
        drafts = np.maximum(records[:, 3] - 1, 0)
        self.flying[indices] -= records[:, 2] - drafts
        self.slack[indices] -= drafts
        if passed is not None:
            self.computed[indices] += passed
            self.known[indices] += passed

    # ---- tokens

    def append(self, indices: Indices, tokens: IntArray, counts: IntArray | None) -> None:
        """Store new tokens of requests.

        Args:
            indices: [n], indices of the requests that get tokens.
            tokens: [num_new], the new tokens of the first of these requests, then of the second,
                and so on.
            counts: [n], number of new tokens of each request; None means that each of them has one
                new token.
        """
        rows, recent = self.row[indices], self.num_recent[indices]
        if counts is None:
            self._recent[rows, recent] = tokens
            self.num_recent[indices] += 1
            self.received[indices] += 1
        else:
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            offsets = np.arange(len(tokens)) - starts
            self._recent[np.repeat(rows, counts), np.repeat(recent, counts) + offsets] = tokens
            self.num_recent[indices] += counts
            self.received[indices] += counts

    def land_tokens(self, indices: slice, tokens: IntArray) -> None:
        """Do the work of ``land`` and ``append`` together, for a step in which all requests decode
        and each of them gets one token.

        Args:
            tokens: [n], the new token of each request.
        """
        self._recent[self.row[indices], self.num_recent[indices]] = tokens
        self._columns[LANDING, indices] += self._changes.landed

    def settle(self, index: int) -> None:
        """Move a request's recent tokens from this object to ``Request.tokens``."""
        request, recent = self.requests[index], int(self.num_recent[index])
        request.tokens.frombytes(self._recent[request.row, :recent].tobytes())
        self.num_recent[index] = 0
