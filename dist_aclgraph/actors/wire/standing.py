"""Where ranks stand that do not answer, and which of them is to blame.

A rank that waits for its device may wait for its peers in a collective. The rank that they wait for
is stuck elsewhere, or does not even say where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.topology import NO_RANK, GroupRank, WorldRank

Places = Mapping[GroupRank, dict[str, Any] | None]  # what ``Worker.ping`` says; None for no answer
Ask = Callable[[Sequence[GroupRank]], Places]


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    rank: the one to blame, or NO_RANK where several may be.
    silent: the ranks that did not answer, e.g. ``rank 4, 5``.
    where: where each of them stands.
    doing: what they are doing, "" where nobody says.
    """

    rank: WorldRank
    silent: str
    where: str
    doing: str


def judge(world_ranks: Sequence[WorldRank], places: Places) -> Verdict:
    """Say who is to blame among ranks that did not answer.

    Args:
        world_ranks: of the whole group.
    """
    silent = sorted(places)
    blamed = [r for r in silent if (place := places[r]) is None or not place["waits"]] or silent
    return Verdict(
        world_ranks[blamed[0]] if len(blamed) == 1 else NO_RANK,
        f"rank {', '.join(str(world_ranks[rank]) for rank in silent)}",
        "; ".join(f"rank {world_ranks[rank]} {_standing(places[rank])}" for rank in silent),
        next((place["doing"] for place in places.values() if place and place["doing"]), ""),
    )


def _standing(place: dict[str, Any] | None) -> str:
    if place is None:
        return "does not say where it stands"
    return "waits for its device" if place["waits"] else "is stuck on its host"
