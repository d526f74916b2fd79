"""CompletionSlots: how many completions may be in the service at once."""

from __future__ import annotations

from collections.abc import Callable

from dist_aclgraph.config import Config
from dist_aclgraph.errors import QueueFullError
from dist_aclgraph.topology import ParallelLayout


class CompletionSlots:
    """Counts completions from their request's first byte on; used on one event loop only.

    The queues of the engines are a second limit, for requests that have arrived there.

    Args:
        of_a_group: completions that may run or wait in one group.
        configured: number of groups in the configuration. It is the least that counts, because
            requests wait for groups that are lost.
        num_groups: returns how many groups there are now; called for each request.
    """

    def __init__(self, of_a_group: int, configured: int, num_groups: Callable[[], int]) -> None:
        self._of_a_group = of_a_group
        self._configured = configured
        self._num_groups = num_groups
        self._taken = 0

    @classmethod
    def from_config(cls, config: Config, num_groups: Callable[[], int]) -> CompletionSlots:
        """Return one slot for each completion that may run or wait on an engine."""
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
        """Whether none is free."""
        return self._taken >= self.total

    def acquire(self, count: int, *, is_owed: bool = False) -> None:
        """Take slots.

        Args:
            is_owed: an earlier process has accepted the request, so that it gets its slots even
                where none is free.

        Raises:
            QueueFullError: fewer slots are free.
        """
        if self._taken + count > (total := self.total) and not is_owed:
            raise full_error(self._taken, total)
        self._taken += count

    def release(self, count: int) -> None:
        self._taken -= count


def full_error(taken: int, total: int) -> QueueFullError:
    """Return the error of a request for which too few slots are free."""
    return QueueFullError(f"{taken} completions run or wait, of {total} that may; try again later")
