"""RunningRows: the requests that have a row on one data-parallel rank, as columns of integers.

Values that change in every step are columns, so a step runs no Python code per request.
"""

from __future__ import annotations

from itertools import compress

import numpy as np
import numpy.typing as npt

from dist_aclgraph.ints import IntArray
from dist_aclgraph.scheduler.request import Request

Places = npt.NDArray[np.intp]
Indices = Places | slice
EVERY = slice(None)

NUM_COLUMNS = 14


class RunningRows:
    """Owns the columns; index i is the i-th request in order of admission.

    With steps in flight, ``computed`` and ``known`` are their smallest values after these steps;
    with drafts they may become larger by ``slack``.

    Attributes: columns of int32, [num_requests] each. row: place in the workers' batch. key: the
    request's key, for its owner. computed: tokens whose KV is in cache; it catches up with
    ``known``. known: tokens that exist, prompt and output. slack: drafts in flight, which may all
    be accepted. flying: number of computed tokens that steps in flight compute. received: number of
    known tokens that the host has. started: tokens of the row at its start; later ones were
    sampled. prompt_end: tokens up to here are computed in chunks; later tokens of the row's start
    are computed one per step, as when they were sampled. limit: prompt and output together end
    here. covered: tokens that the request's blocks have room for. next_full: number of computed
    tokens at which one more block is full. num_recent: tokens that ``settle`` adds to the request's
    own. can_verify: 1 if drafts may be accepted, 0 if penalties make tokens depend on them.

    Args:
        capacity: rows of the batch.
        window: number of new tokens of a request that are kept here before ``settle`` must be
            called.
    """

    def __init__(self, capacity: int, window: int) -> None:
        self.requests: list[Request] = []
        self._columns = np.zeros((NUM_COLUMNS, capacity), np.int32)
        self._recent = np.zeros((capacity, window), np.int32)  # by row: latest tokens
        self._index_of_row = np.zeros(capacity, np.intp)
        self._name_columns()

    def _name_columns(self) -> None:
        """Make the attributes views of the current number of requests."""
        (
            self.row,
            self.key,
            self.computed,
            self.known,
            self.slack,
            self.flying,
            self.received,
            self.started,
            self.prompt_end,
            self.limit,
            self.covered,
            self.next_full,
            self.num_recent,
            self.can_verify,
        ) = self._columns[:, : len(self.requests)]

    def __len__(self) -> int:
        return len(self.requests)

    # ---- requests

    def add(
        self, request: Request, *, computed: int, covered: int, next_full: int, prompt_end: int
    ) -> int:
        """Append a request that has a row and blocks; return its index."""
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
            num_tokens,
            prompt_end,
            request.max_total_tokens,
            covered,
            next_full,
            0,
            not request.sampling.has_penalties,
        )
        self._index_of_row[request.row] = index
        self._name_columns()
        return index

    def index_of(self, request: Request) -> int:
        return int(self._index_of_row[request.row])

    def select(self, indices: Indices) -> list[Request]:
        """Return the requests at indices."""
        if isinstance(indices, slice):
            return self.requests[indices]
        return list(map(self.requests.__getitem__, indices.tolist()))

    def remove(self, indices: list[int]) -> Places:
        """Remove requests; later ones move up. Their own token lists are updated first.

        Returns:
            [num_requests before], new index of each request; -1 if removed.
        """
        for index in indices:
            self.settle(index)
        num_kept = len(self.requests) - len(indices)
        keep = np.ones(len(self.requests), bool)
        keep[indices] = False
        self._columns[:, :num_kept] = self._columns[:, : len(self.requests)][:, keep]
        self.requests = list(compress(self.requests, keep))
        self._name_columns()
        self._index_of_row[self.row] = np.arange(num_kept)
        return np.where(keep, np.cumsum(keep) - 1, -1)

    # ---- steps

    def take_off(self, indices: Indices, records: IntArray) -> None:
        """Count the least results of a step that was decided.

        Args:
            records: [n, 4] as in ``RankBatch.scheduled``, of the requests at indices.
        """
        drafts = np.maximum(records[:, 3] - 1, 0)
        grown = records[:, 2] - drafts
        self.computed[indices] += grown
        self.flying[indices] += grown
        self.known[indices] += records[:, 3] > 0
        self.slack[indices] += drafts

    def put_back(self, indices: Indices, records: IntArray) -> None:
        """Undo a step that counts for nothing. Arguments as ``take_off``."""
        drafts = np.maximum(records[:, 3] - 1, 0)
        grown = records[:, 2] - drafts
        self.computed[indices] -= grown
        self.flying[indices] -= grown
        self.known[indices] -= records[:, 3] > 0
        self.slack[indices] -= drafts

    def land(self, indices: Indices, records: IntArray, passed: IntArray | None) -> None:
        """Count the results of a step that has run.

        Args:
            records: as for ``take_off``.
            passed: [n], accepted drafts of each request; None means none.
        """
        drafts = np.maximum(records[:, 3] - 1, 0)
        self.flying[indices] -= records[:, 2] - drafts
        self.slack[indices] -= drafts
        if passed is not None:
            self.computed[indices] += passed
            self.known[indices] += passed

    # ---- tokens

    def append(self, indices: Indices, tokens: IntArray, counts: IntArray | None) -> None:
        """Receive new tokens.

        Args:
            indices: [n], indices of the requests that get tokens.
            tokens: [num_new], request by request.
            counts: [n]; None means one each.
        """
        rows, recent = self.row[indices], self.num_recent[indices]
        if counts is None:
            self._recent[rows, recent] = tokens
            grown: IntArray | int = 1
        else:
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            offsets = np.arange(len(tokens)) - starts
            self._recent[np.repeat(rows, counts), np.repeat(recent, counts) + offsets] = tokens
            grown = counts
        self.num_recent[indices] += grown
        self.received[indices] += grown

    def settle(self, index: int) -> None:
        """Update a request's own token list."""
        request, recent = self.requests[index], int(self.num_recent[index])
        request.tokens.frombytes(self._recent[request.row, :recent].tobytes())
        self.num_recent[index] = 0
