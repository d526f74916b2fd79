"""The rank that is blamed if several ranks do not answer."""

from __future__ import annotations

import pytest

from dist_aclgraph.actors.wire.blame import judge
from dist_aclgraph.topology import NO_RANK, GroupRank, WorldRank

RANKS = [WorldRank(rank) for rank in (4, 5, 6)]
WAITS = {"doing": "capture full decode 4", "waits": True}
STUCK = {**WAITS, "waits": False}


@pytest.mark.parametrize(
    ("statuses", "rank", "where"),
    [
        ([WAITS, STUCK, WAITS], 5, "rank 5 is stuck on its host"),
        ([WAITS, None, WAITS], 5, "rank 5 does not say where it stands"),
        ([WAITS, WAITS, WAITS], NO_RANK, "rank 5 waits for its device"),
        ([STUCK, None, WAITS], NO_RANK, "rank 6 waits for its device"),
    ],
)
def test_ranks_that_do_not_wait_for_their_device_are_blamed(
    statuses: list[dict[str, object] | None], rank: int, where: str
) -> None:
    verdict = judge(RANKS, {GroupRank(index): status for index, status in enumerate(statuses)})

    assert verdict.rank == rank
    assert verdict.silent == "rank 4, 5, 6"
    assert where in verdict.where
    assert verdict.doing == "capture full decode 4"
