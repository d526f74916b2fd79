"""Finds out what each silent rank does, and which of the silent ranks causes the failure.

If a rank waits for its device, the device may be waiting for other ranks in a collective. So such a
rank does not count as the cause of the failure. A rank counts as the cause if it is stuck on its
host, or does not answer at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.topology import NO_RANK, GroupRank, WorldRank

# The status that ``Worker.ping`` returned; None if the worker did not answer.
RankStatuses = Mapping[GroupRank, dict[str, Any] | None]
AskRanks = Callable[[Sequence[GroupRank]], RankStatuses]


@dataclass(frozen=True)
class Verdict:
    """The rank that causes a failure, and what the silent ranks do. A silent rank is a rank that
    did not answer in time.

    Attributes:
        rank: the rank that causes the failure; NO_RANK if several ranks may be the cause.
        silent: a text that names the ranks that did not answer, e.g. ``rank 4, 5``.
        where: a text that says what each silent rank waits for.
        doing: the operation that the silent ranks run; "" if no rank reports its operation.
    """

    rank: WorldRank
    silent: str
    where: str
    doing: str


def judge(world_ranks: Sequence[WorldRank], statuses: RankStatuses) -> Verdict:
    """Return which of the ranks that did not answer in time (``statuses``) caused the failure.

    Args:
        world_ranks: the world ranks of the whole group.
    """
    silent = sorted(statuses)
    blamed = [r for r in silent if (status := statuses[r]) is None or not status["waits"]] or silent
    return Verdict(
        world_ranks[blamed[0]] if len(blamed) == 1 else NO_RANK,
        f"rank {', '.join(str(world_ranks[rank]) for rank in silent)}",
        "; ".join(f"rank {world_ranks[rank]} {_status_of(statuses[rank])}" for rank in silent),
        next((status["doing"] for status in statuses.values() if status and status["doing"]), ""),
    )


def _status_of(status: dict[str, Any] | None) -> str:
    if status is None:
        return "does not say where it stands"
    return "waits for its device" if status["waits"] else "is stuck on its host"
