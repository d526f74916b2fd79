"""If MC2's algorithm does not support the nodes of the ranks, the start is refused before the ranks
load weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast
from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.startup import Startup
from dist_aclgraph.actors.controller.state import State
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.worker.rank_facts import JoinedDevice, WorkerInfo
from dist_aclgraph.actors.worker.rank_stages import JoinedRank
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import StartLimit
from dist_aclgraph.topology import Ranks
from tests.serve.conftest import CONFIG


class CalledError(Exception):
    """Raised by a fake group when a phase calls a method of its ranks."""


@dataclass
class JoinedRanks:
    """Ranks that have joined their group. Each call of their methods raises ``CalledError``."""

    infos: list[WorkerInfo]
    is_emulated: bool

    def call(self, method: str, *arguments: Any) -> list[Any]:
        raise CalledError(method)


class StartOfJoined(Startup):
    """The phases of a start that follow after the ranks have joined."""

    def _start_command(self) -> str | None:
        return None

    def _place(self, ranks: Sequence[Ranks], deployment: str) -> None:
        pass

    def _find_out(self) -> None:
        pass

    def _join(self, group: LockstepGroup) -> None:
        pass


@pytest.mark.parametrize(
    ("hosts", "is_emulated", "needed", "error"),
    [
        ("a" * 16, False, 8, PlacementError),
        ("a" * 8 + "b" * 8, False, 8, CalledError),
        ("a" * 16, False, None, CalledError),
        ("a" * 16, True, 8, CalledError),
    ],
)
def test_ranks_load_weights_only_on_nodes_that_their_own_chips_support(
    hosts: str, is_emulated: bool, needed: int | None, error: type[Exception]
) -> None:
    planner = Planner.from_config(load_config(CONFIG))
    infos = [WorkerInfo(host, "", host, 1, (npu,), "npu") for npu, host in enumerate(hosts)]
    ranks = cast(WorkerGroup, JoinedRanks(infos, is_emulated))
    devices = [JoinedDevice("an NPU", needed) for _ in hosts]
    groups = [LockstepGroup(ranks, planner, devices=devices)]
    phases: list[State] = []
    startup = StartOfJoined(
        planner, groups, ProcessStarter(), StartLimit(), phases.append, lambda *progress: None
    )

    with pytest.raises(error):
        startup.run([], deployment="")

    assert (phases[-1] is State.LOADING) == (error is CalledError)


def test_a_rank_that_has_joined_knows_what_its_own_chip_needs() -> None:
    parts: dict[str, Any] = dict.fromkeys((part.name for part in fields(JoinedRank)), Mock())
    parts |= {"npu": Mock(description="NPU A"), "exchange": Mock(ranks_of_node=8)}

    joined = JoinedRank(**parts | {"cores": frozenset({1, 2})})

    assert joined.device == JoinedDevice("NPU A, bound to 2 cores of the host", 8)
