"""A model of recovery: after any deaths at any time, a deployment serves or ends with an error.

Upkeep, its budget of restarts, and the client's outage are the real classes. Groups have no
processes, and time is a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dist_aclgraph.actors.client.outage import Outage, Outlook, Recovery
from dist_aclgraph.actors.client.token_log import OpenRequest
from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.controller.state import State, advance
from dist_aclgraph.actors.controller.upkeep import Upkeep
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import PlacementError, WorkerLostError
from dist_aclgraph.planning.restarts import HOUR_S, LONGEST_PAUSE_S
from dist_aclgraph.planning.way_back import SOUND_S
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import CONFIG

WAIT_S = 300.0  # recovery.wait_s
SAMPLING = row_sampling(SamplingParams(max_tokens=9), seed=1, num_prompt_tokens=1, end_ids=())


@dataclass
class Group:
    number: int
    lost_because: str = ""
    is_draining: bool = False
    num_rows: int = 1
    served_s: float = 0.0  # seconds that the group had served when it was lost


@dataclass
class Groups:
    """The groups of a deployment, with the interface that Upkeep uses.

    ``has_room`` decides whether there are free NPUs for a group, and ``comes_up`` whether its start
    succeeds.
    """

    num_wanted: int
    config: Any
    on_open: Callable[[], None] = lambda: None
    groups: list[Group] = field(default_factory=list)
    watched: list[Group] = field(default_factory=list)
    trouble: str = ""  # the reason why the groups cannot be watched; "" if there is no reason
    has_room: bool = True
    comes_up: bool = True
    started: int = 0
    is_changing: bool = False
    restart_ages_s: tuple[float, ...] = ()  # ages that were last sent to the engines

    def __post_init__(self) -> None:
        for _ in range(self.num_wanted):
            self.start()
        self.traffic = self.watch = self

    def start(self) -> Group:
        group = Group(self.started)
        self.started += 1
        self.groups.append(group)
        self.on_open()  # at this moment, clients and the driver can already send questions
        self.watched.append(group)
        return group

    @property
    def taking(self) -> list[Group]:
        return [group for group in self.groups if not group.lost_because]

    @property
    def lost(self) -> list[Group]:
        return [group for group in self.groups if group.lost_because]

    @property
    def serves(self) -> bool:
        return bool(self.taking)

    @property
    def num_missing(self) -> int:
        return self.num_wanted - len(self.taking)

    def give_up_lost(self, *, are_replaced: bool) -> None:
        """Do nothing, because lost groups have no processes in this model."""

    def prepare_starter(self) -> None:
        """Do nothing, because this model forks no processes."""

    def find_place(self) -> None:
        if not self.has_room:
            raise PlacementError("no NPU is free")

    def replace_one(self) -> None:
        lost = self.lost[:1]
        if self.num_missing:
            if not self.comes_up:
                raise WorkerLostError("the process died", rank=0, phase="CAPTURING")
            self.start()
        for group in lost:
            self.watched.remove(group)
            self.groups.remove(group)

    def set_restarts(self, ages_s: Sequence[float]) -> None:
        self.restart_ages_s = tuple(ages_s)

    def failure(self) -> str:
        """Return the last failure if all watched groups are lost; see ``GroupWatch.failure``."""
        is_served = any(not group.lost_because for group in self.watched)
        return "" if is_served else "rank 0 in SERVING: the process died"

    def look(self, now_s: float) -> None:
        """Do nothing, because there is no traffic."""


@dataclass
class BegunChange:
    """A change of the groups that ends when the model calls ``end``."""

    work: Callable[[], None]
    is_over: bool = False

    def is_alive(self) -> bool:
        return not self.is_over

    def end(self) -> None:
        self.work()
        self.is_over = True


@dataclass
class Client:
    """Routes requests as EngineClient does. It uses the real classes Outage and OpenRequest."""

    groups: Groups
    outage: Outage
    running: dict[int, list[OpenRequest]] = field(default_factory=dict)
    submitted: int = 0
    ended: list[tuple[str, str]] = field(default_factory=list)

    def submit(self, now_s: float) -> None:
        log = OpenRequest(
            str(self.submitted), bytearray(pack_ints([1])), SAMPLING, 9, (), "", lambda delta: None
        )
        self.submitted += 1
        self.place(log, now_s)

    def place(self, request: OpenRequest, now_s: float) -> None:
        if self.groups.taking:
            self.running.setdefault(self.groups.taking[0].number, []).append(request)
        elif not self.outage.hold(request, now_s):
            self.ended.append((request.request_id, self.outage.outlook.failure or "dead"))

    def see_death(self, group: Group, now_s: float) -> None:
        for request in self.running.pop(group.number, []):
            request.see_death(now_s, is_proof=False)
            if request.is_cause:
                self.ended.append((request.request_id, f"{request.num_deaths} engines died"))
            else:
                self.place(request, now_s)

    def step(self) -> None:
        """Give each running request one token, and end the requests that have all tokens."""
        for number, requests in self.running.items():
            for request in requests:
                request.note(RequestDelta(request.request_id, pack_ints([1])))
            over = [r for r in requests if r.num_output_tokens == r.max_tokens]
            self.ended += [(request.request_id, "") for request in over]
            self.running[number] = [r for r in requests if r not in over]

    def turn(self, now_s: float, failure: str) -> None:
        is_served = self.groups.serves
        self.outage.see(now_s, is_served=is_served)
        if is_served:
            for request in self.outage.take_all():
                self.place(request, now_s)
            return
        self.outage.outlook = Outlook(failure=failure)
        over = self.outage.take_all() if failure else self.outage.take_overdue(now_s)
        reason = failure or self.outage.overdue_reason()
        self.ended += [(request.request_id, reason) for request in over]

    @property
    def num_open(self) -> int:
        return len(self.outage) + sum(map(len, self.running.values()))


class RecoveryModel(RuleBasedStateMachine):
    """Makes deaths, starts and checks happen in any order."""

    @initialize(num_groups=st.integers(1, 3), per_hour=st.integers(1, 4))
    def start(self, num_groups: int, per_hour: int) -> None:
        config = load_config(CONFIG, {"recovery.restarts_per_hour": per_hour})
        self.now_s = 0.0
        self.state = State.SERVING
        self.changes: list[BegunChange] = []
        self.groups = Groups(num_groups, config)
        self.upkeep = Upkeep(
            cast(ServingGroups, self.groups), self.see_service, lambda: self.now_s, self.begin
        )
        self.groups.on_open = self.what_serves_has_not_failed
        self.client = Client(self.groups, Outage(Recovery(Outlook, WAIT_S)))

    def begin(self, work: Callable[[], None]) -> BegunChange:
        assert not any(change.is_alive() for change in self.changes), "one change at a time"
        self.changes.append(BegunChange(work))
        return self.changes[-1]

    def see_service(self, serves: bool) -> None:
        """Change the deployment's state as the controller does."""
        wanted = State.SERVING if serves else State.RECOVERING
        if self.state is not wanted:
            self.state = advance(self.state, wanted)

    @property
    def is_over(self) -> bool:
        return bool(self.upkeep.failure)

    @property
    def is_restored(self) -> bool:
        return not (self.groups.num_missing or self.client.num_open)

    # ---- events

    @precondition(lambda self: self.groups.taking)
    @rule(which=st.integers(0, 10), served_s=st.sampled_from([0.0, SOUND_S]))
    def die(self, which: int, served_s: float) -> None:
        group = self.groups.taking[which % len(self.groups.taking)]
        group.served_s = served_s
        group.lost_because = "the process died"
        self.client.see_death(group, self.now_s)

    @rule(seconds=st.sampled_from([0.2, 1.0, 10.0, WAIT_S, HOUR_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def look(self) -> None:
        self.upkeep.look()

    @precondition(lambda self: any(change.is_alive() for change in self.changes))
    @rule(comes_up=st.booleans(), has_room=st.booleans())
    def end_change(self, comes_up: bool, has_room: bool) -> None:
        self.groups.comes_up, self.groups.has_room = comes_up, has_room
        self.changes[-1].end()

    @rule()
    def submit(self) -> None:
        if not self.is_over:
            self.client.submit(self.now_s)

    @rule()
    def step(self) -> None:
        self.client.step()

    @rule()
    def turn(self) -> None:
        self.client.turn(self.now_s, self.upkeep.failure)

    # ---- invariants

    @invariant()
    def no_request_is_forgotten(self) -> None:
        assert self.client.num_open + len(self.client.ended) == self.client.submitted

    @invariant()
    def what_has_failed_stays_so_within_the_hour(self) -> None:
        """A failed deployment stays failed after another check."""
        if self.is_over:
            self.upkeep.look()
            assert self.is_over

    @invariant()
    def no_request_ends_twice(self) -> None:
        names = [name for name, _ in self.client.ended]
        assert len(names) == len(set(names))

    @invariant()
    def what_serves_has_not_failed(self) -> None:
        assert not (self.groups.serves and self.upkeep.failure)

    def teardown(self) -> None:
        """Check that after the last death all groups serve, or that the deployment has failed."""
        if not hasattr(self, "upkeep"):
            return
        self.groups.comes_up = self.groups.has_room = True
        until_s = self.now_s + self.groups.num_wanted * (HOUR_S + LONGEST_PAUSE_S)
        while self.now_s < until_s and not (self.is_over or self.is_restored):
            self.upkeep.look()
            if self.changes and self.changes[-1].is_alive():
                self.changes[-1].end()
            self.turn()
            self.client.step()
            self.now_s += 60.0
        self.upkeep.look()
        self.turn()
        self.client.outage.outlook_poller.close()  # type: ignore[union-attr]
        assert self.client.num_open == 0
        if self.is_over:
            assert "recovery.restarts_per_hour allows" in self.upkeep.failure
            assert self.state is State.RECOVERING
        else:
            assert (self.groups.num_missing, self.state) == (0, State.SERVING)
            assert self.upkeep.trouble == ""


TestRecovery = RecoveryModel.TestCase


def test_a_place_that_appears_ends_the_pause() -> None:
    """A host is absent for ten minutes. After its return, the group starts within two checks."""
    groups = Groups(1, load_config(CONFIG))
    clock = [0.0]
    upkeep = Upkeep(
        cast(ServingGroups, groups), lambda serves: None, lambda: clock[0], lambda work: work()
    )
    groups.has_room = False
    groups.taking[0].lost_because = "the node died"
    while clock[0] < 600.0:
        upkeep.look()
        clock[0] += 1.0
    assert not groups.taking

    groups.has_room = True
    for _ in range(2):
        upkeep.look()
        clock[0] += 1.0

    assert groups.taking


@pytest.mark.parametrize(("served_s", "count"), [(SOUND_S, 10), (SOUND_S - 1.0, 1)])
def test_groups_that_served_for_long_never_use_up_the_restarts(served_s: float, count: int) -> None:
    groups = Groups(1, load_config(CONFIG, {"recovery.restarts_per_hour": 1}))
    clock = [0.0]
    upkeep = Upkeep(
        cast(ServingGroups, groups), lambda serves: None, lambda: clock[0], lambda work: work()
    )
    for _ in range(10):
        for group in groups.taking:
            group.served_s, group.lost_because = served_s, "a rank died"
        assert count == 1 or not upkeep.failure, "clients may ask before upkeep looks"
        upkeep.look()
        clock[0] += 300.0

    assert groups.started == 1 + count
    assert bool(upkeep.failure) == (count == 1)


def test_engines_know_the_restarts_of_lost_groups() -> None:
    groups = Groups(1, load_config(CONFIG))
    clock = [50.0]
    upkeep = Upkeep(
        cast(ServingGroups, groups), lambda serves: None, lambda: clock[0], lambda work: work()
    )
    for _ in range(2):
        groups.taking[0].lost_because = "a rank died"
        upkeep.look()
        clock[0] += 10.0

    assert groups.restart_ages_s == (10.0, 0.0)
