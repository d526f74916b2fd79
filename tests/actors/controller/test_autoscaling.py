"""If the load needs more groups but no NPU is free, the deployment tries again later. This file
also contains tests of refused rolls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from unittest.mock import Mock

import pytest

from dist_aclgraph.actors.cluster.placement import ROOM_S
from dist_aclgraph.actors.cluster.spares import Spares
from dist_aclgraph.actors.controller import group_calls, roll, serving_groups
from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.controller.term import Term
from dist_aclgraph.actors.controller.upkeep import GROWTH_PAUSE_S, Upkeep
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import ConfigError, PlacementError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.restarts import LONGEST_PAUSE_S, StartLimit
from tests.actors.recovery.test_recovery_model import BegunChange, Groups
from tests.serve.conftest import CONFIG

UP_S = 5.0
AUTOSCALE = {"serve.autoscale.max_groups": 3, "serve.autoscale.up_s": UP_S}
BUSY = (1, 1000)  # number of running requests, number of waiting requests


@dataclass
class ScaledGroups(Groups):
    """Groups that report many waiting requests, so that Upkeep tries to start more groups."""

    now_s: float = 0.0
    tries_s: list[float] = field(default_factory=list)

    def scale(self, count: int, room_s: float) -> None:
        assert room_s == 0.0, "no lost group is replaced while this one waits"
        self.tries_s.append(self.now_s)
        if not self.has_room:
            raise PlacementError("no NPU is free")
        self.num_wanted = count
        self.start()

    def upkeep(self) -> Upkeep:
        """Return an Upkeep to which all groups report a high load. Each change of the groups that
        this Upkeep begins ends at once.
        """

        def begin(work: Callable[[], None]) -> BegunChange:
            work()
            return BegunChange(work, is_over=True)

        return Upkeep(
            cast(ServingGroups, self),
            lambda serves: None,
            lambda: self.now_s,
            begin,
            lambda taking: BUSY,
        )


class CrowdedGroups(ServingGroups):
    """The serving groups of a cluster in which no NPU is free.

    Attributes:
        looks: for each check for free NPUs, its time limit in seconds, and whether other changes of
            the groups were refused during the check.
    """

    def __init__(self) -> None:
        planner = Planner.from_config(load_config(CONFIG))
        super().__init__(
            "test", Term(0, ""), planner, Spares("test", 0), ProcessStarter(),
            StartLimit(), lambda phase: None, lambda done, total, detail: None,
        )  # fmt: skip
        self.looks: list[tuple[float, bool]] = []

    def check_room(self, count: int, wait_s: float) -> None:
        self.looks.append((wait_s, self.is_changing))
        raise PlacementError("no NPU is free")


def test_a_roll_to_changed_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = CrowdedGroups()
    monkeypatch.setattr(roll, "hash_sources", lambda: "of another version")

    with pytest.raises(ConfigError, match="start a new service for the new version"):
        groups.roll(groups.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_overrides", {"rope_theta": 5e6}),
        ("served_model_aliases", ["another"]),
        ("task", "embed"),
        ("sampling_defaults", "none"),
        ("seed", 5),
    ],
)
def test_a_roll_that_changes_a_key_of_ingresses_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} changes, which ingresses have read"):
        CrowdedGroups().roll(load_config(CONFIG, {key: value}))


def test_without_room_growing_is_tried_less_and_less_often_with_one_warning_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = ScaledGroups(1, load_config(CONFIG, AUTOSCALE), has_room=False)
    upkeep = groups.upkeep()

    for groups.now_s in range(3600):
        upkeep.look()

    pauses_s = [later - earlier for earlier, later in pairwise(groups.tries_s)]
    assert pauses_s == sorted(pauses_s)
    assert GROWTH_PAUSE_S <= pauses_s[0] <= GROWTH_PAUSE_S + 2 * UP_S
    assert LONGEST_PAUSE_S <= pauses_s[-1] <= LONGEST_PAUSE_S + 2 * UP_S
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == len(groups.tries_s)
    assert all("no NPU is free" in each.getMessage() and not each.exc_info for each in said)


def test_when_npus_become_free_groups_are_added_at_the_usual_pace() -> None:
    groups = ScaledGroups(1, load_config(CONFIG, AUTOSCALE), has_room=False)
    upkeep = groups.upkeep()

    for groups.now_s in range(1800):
        groups.has_room = groups.now_s >= 1000
        upkeep.look()

    first, second = groups.tries_s[-2:]
    assert len(groups.taking) == 3
    assert second - first <= 2 * UP_S


def test_no_change_is_refused_while_another_waits_for_room() -> None:
    groups = CrowdedGroups()

    with pytest.raises(PlacementError):
        groups.scale(2)
    with pytest.raises(PlacementError):
        groups.find_place()

    assert groups.looks == [(ROOM_S, False), (ROOM_S, False)]


def test_copies_are_deleted_after_workers_have_stopped_to_write_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[Any] = []

    def wait(refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
        happened.append(refs)
        return [ref for ref in refs if ref != "stop of lost"], []

    def make_group(name: str) -> Any:
        group = Mock(loops=[f"loop of {name}"], file_ranks=[1])
        group.workers.workers = [Mock(), Mock()]
        group.workers.workers[1].leave_copies.remote.return_value = f"leave of rank 1 of {name}"
        group.engine.stop.remote.return_value = f"stop of {name}"
        group.engine.leave_copies.remote.return_value = f"leave of {name}"
        group.kill = lambda: happened.append(f"kill {name}")
        return group

    monkeypatch.setattr(group_calls.ray, "wait", wait)
    group_calls.stop_groups([make_group("lost"), make_group("good"), Mock(engine=None)], 1.0)

    assert happened[:2] == [
        ["stop of lost", "stop of good", "loop of lost", "loop of good"],
        ["leave of good", "leave of rank 1 of good"],
    ]
    assert happened[2:] == ["kill lost", "kill good"]


def test_a_lost_group_is_given_back_when_so_many_are_wanted_as_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped: list[LockstepGroup] = []
    monkeypatch.setattr(serving_groups, "stop_groups", lambda groups, _: stopped.extend(groups))
    crowded = CrowdedGroups()
    crowded.watch = crowded.traffic = Mock()
    address = Address("node", Endpoint("ipc:///nowhere"))
    crowded.groups = serves, lost = [
        LockstepGroup(Mock(), Planner.from_config(crowded.config), Mock(), opened_at=address)
        for _ in range(2)
    ]
    for group in (serves, lost):
        group.enter(GroupState.SERVING)
    lost.lost_because = "rank 1 in SERVING: the process died"
    lost.enter(GroupState.LOST)

    crowded.scale(1)

    assert stopped == [lost]
    assert crowded.groups == [serves]
    assert crowded.num_missing == 0
    # The list of groups that engines send to clients no longer contains the lost group.
    [groups] = serves.engine.set_groups.remote.call_args.args
    assert len(groups.groups) == 1
