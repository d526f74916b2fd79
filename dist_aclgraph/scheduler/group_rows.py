"""GroupRows: arrays of numbers that describe the running requests of all data-parallel ranks of a
group.

In most steps, there are many ranks on which every request decodes and gets one token. The results
of all these ranks are applied together, so that a group of hundreds of ranks needs no Python loop
over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.scheduler.rows import (
    LANDING,
    NUM_COLUMNS,
    TAKING_OFF,
    Columns,
    Places,
    RunningRows,
    StepChanges,
)

MOST = np.iinfo(np.int32).max


class Landed(NamedTuple):
    """The results of several ranks on which every request got one token. The requests are in the
    order of the ranks.

    Attributes:
        appended: [num_requests, 2], row and token id of each request.
        keys: [num_requests], the attribute ``key`` of each request.
        has_full: [num_ranks], whether at least one request of the rank has filled a block.
    """

    appended: IntArray
    keys: IntArray
    has_full: Sequence[bool]


class GroupRows(Columns):
    """Owns the columns of numbers (``Columns``) that describe the running requests of all ranks.
    Each rank's ``RunningRows`` has a view of the rank's columns.

    Args:
        capacity: maximum number of rows of each rank's batch.
        window: maximum number of a request's new tokens before ``settle`` is called.
        num_drafts: number of drafts of a request that decodes.
    """

    def __init__(self, num_ranks: int, capacity: int, window: int, num_drafts: int = 0) -> None:
        self._columns = np.zeros((NUM_COLUMNS, num_ranks, capacity), np.int32)
        self._recent = np.zeros((num_ranks, capacity, window), np.int32)
        self._num_drafts = num_drafts
        changes = StepChanges.of(num_drafts)
        self._taken_off, self._landed = changes.taken_off[:, :, None], changes.landed[:, :, None]
        self._capacity = capacity
        self._name_columns(self._columns)

    def of_rank(self, rank: int) -> RunningRows:
        return RunningRows(self._columns[:, rank], self._recent[rank], self._num_drafts)

    def take_off(self, ranks: Sequence[int]) -> None:
        """Apply ``RunningRows.take_off`` to several ranks on which every request of the step
        decodes.

        Args:
            ranks: indices of these ranks.
        """
        if len(ranks) == self._columns.shape[1]:
            self._columns[TAKING_OFF] += self._taken_off
        else:
            self._columns[TAKING_OFF, ranks] += self._taken_off

    def stay_below_limit(self, ranks: Places, lens: Places) -> list[bool]:
        """Return, for each rank, whether every request stays below its maximum length after one
        more token.

        Args:
            ranks: [n], indices of ranks, each at most once.
            lens: [n], number of requests of each rank.
        """
        is_last = self.received[ranks] + 1 >= self.limit[ranks]
        found: list[bool] = (~(is_last & self._is_used(lens)).any(1)).tolist()
        return found

    def land_tokens(self, ranks: Places, lens: Places, tokens: IntArray) -> Landed:
        """Apply ``RunningRows.land_tokens`` to all requests of several ranks.

        Args:
            ranks, lens: [n], indices of ranks, and the number of requests of each of these ranks.
            tokens: [num_requests], the new token of each request, rank by rank.
        """
        is_used = self._is_used(lens)
        place, at = np.nonzero(is_used)
        rank = ranks[place]
        row = self.row[rank, at]
        self._recent[rank, row, self.num_recent[rank, at]] = tokens
        self._columns[LANDING, ranks] += self._landed
        is_full = self.computed[ranks] - self.flying[ranks] >= self.next_full[ranks]
        return Landed(
            np.stack([row, tokens], 1), self.key[rank, at], (is_full & is_used).any(1).tolist()
        )

    def least_margins(self, ranks: Places, lens: Places) -> list[int]:
        """Return, for each rank, the smallest value of ``Columns.margins`` of its requests."""
        found: list[int] = (
            np.where(self._is_used(lens), self.margins()[ranks], MOST).min(1).tolist()
        )
        return found

    def _is_used(self, lens: Places) -> npt.NDArray[np.bool_]:
        """Return [n, capacity] booleans: true at the indices of a rank's running requests."""
        is_used: npt.NDArray[np.bool_] = np.arange(self._capacity) < lens[:, None]
        return is_used
