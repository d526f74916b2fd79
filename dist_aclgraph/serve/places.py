"""Places: how many completions may be in the service at once."""

from __future__ import annotations

from dist_aclgraph.config import Config
from dist_aclgraph.errors import QueueFullError
from dist_aclgraph.topology import ParallelLayout


class Places:
    """Counts completions from their request's first byte on; used on one event loop only.

    The engines' own queues are the second bound: they count only what has reached them.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0

    @classmethod
    def from_config(cls, config: Config) -> Places:
        """Return as many as may run or wait on all engines."""
        groups = len(ParallelLayout.from_config(config.parallel).lockstep_groups)
        limits = config.scheduler
        return cls(groups * limits.max_waiting + config.parallel.dp * limits.max_num_seqs)

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def is_full(self) -> bool:
        """Whether none is free."""
        return self._taken >= self._total

    def full_error(self) -> QueueFullError:
        """Return what is said while none is free."""
        return _full(self._total, self._total)

    def take(self, count: int) -> None:
        """Take places.

        Raises:
            QueueFullError: so many are not free.
        """
        if self._taken + count > self._total:
            raise _full(self._taken, self._total)
        self._taken += count

    def give_back(self, count: int) -> None:
        self._taken -= count


def _full(taken: int, total: int) -> QueueFullError:
    return QueueFullError(f"{taken} completions run or wait, of {total} that may; try again later")
