"""Limits the number of completions that run or wait at the same time in one ingress."""

from __future__ import annotations

from collections.abc import Callable

from dist_aclgraph.config import Config
from dist_aclgraph.errors import QueueFullError
from dist_aclgraph.topology import ParallelLayout


class CompletionSlots:
    """Counts a completion from the moment at which the first byte of its request arrives. For one
    event loop only.

    A request keeps its slots while it waits in the queue of an engine. This queue has its own
    limit.

    Args:
        of_a_group: number of completions that may run or wait in one group.
        configured: number of groups in the configuration. There are always slots for at least this
            number of groups. While a lost group is being replaced, requests wait in its slots.
        num_groups: a function that returns the current number of groups; called for each request.
    """

    def __init__(self, of_a_group: int, configured: int, num_groups: Callable[[], int]) -> None:
        self._of_a_group = of_a_group
        self._configured = configured
        self._num_groups = num_groups
        self._taken = 0

    @classmethod
    def from_config(cls, config: Config, num_groups: Callable[[], int]) -> CompletionSlots:
        """Return an object with one slot for each completion that may run or wait on an engine."""
        configured = len(ParallelLayout.from_config(config.parallel).lockstep_groups)
        limits = config.scheduler
        of_a_group = limits.max_waiting + config.parallel.dp // configured * limits.max_num_seqs
        return cls(of_a_group, configured, num_groups)

    @property
    def total(self) -> int:
        return self._of_a_group * max(self._num_groups(), self._configured)

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def is_full(self) -> bool:
        return self._taken >= self.total

    def acquire(self, count: int, *, is_owed: bool = False) -> None:
        """Reserve slots for completions.

        Args:
            is_owed: whether a previous process has accepted the request. If true, the request gets
                slots even if no slot is free.

        Raises:
            QueueFullError: there are not enough free slots.
        """
        if self._taken + count > (total := self.total) and not is_owed:
            raise full_error(self._taken, total)
        self._taken += count

    def release(self, count: int) -> None:
        self._taken -= count


def full_error(taken: int, total: int) -> QueueFullError:
    """Return the error for a request that finds too few free slots."""
    return QueueFullError(f"{taken} completions run or wait, of {total} that may; try again later")
