"""Client and engine decide which group computes a prompt, and which group generates the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dist_aclgraph.actors.client.request_table import RequestTable
from dist_aclgraph.actors.client.token_log import OpenRequest, TransferRole
from dist_aclgraph.actors.controller import serving_groups
from dist_aclgraph.actors.controller.group_state import GroupState
from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.engine.hand_overs import HandOvers
from dist_aclgraph.actors.engine.recipients import Recipients
from dist_aclgraph.actors.wire.messages import Deltas, Submit
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.config import make_config
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request, row_sampling
from dist_aclgraph.scheduler.routing import RequestRouter
from dist_aclgraph.steps.delta import Note, RequestDelta, StepDeltas
from tests.unit.scheduler.requests import submit

PREFILL, FIRST, SECOND = "prefill", "first", "second"
FROM = 32


@dataclass
class FakeLink:
    is_welcome: bool = True
    is_lost: bool = False
    loss_kind: str = "ended"


@dataclass
class World:
    """A client's table of three groups. One group is the prefill group."""

    sent: list[tuple[str, Submit]] = field(default_factory=list)
    told: list[RequestDelta] = field(default_factory=list)

    def __post_init__(self) -> None:
        def send(engine: Any, message: Submit) -> None:
            self.sent.append((engine.name, message))

        self.table = RequestTable(RequestRouter(), None, send)
        for name in (PREFILL, FIRST, SECOND):
            self.table.add(name, name, FakeLink, 0.0, cache_blocks=64, tokens_per_block=16)
        self.table.engines[PREFILL].prefill_from = FROM

    def place(
        self,
        name: str,
        length: int,
        count: int = 8,
        salt: str = "",
        role: TransferRole = "",
        **options: Any,
    ) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, **options)
        sampling = row_sampling(params, seed=0, num_prompt_tokens=length, end_ids=[])
        prompt = bytearray(pack_ints(range(length)))
        request = OpenRequest(name, prompt, sampling, count, (), salt, self.told.append, role=role)
        assert self.table.place(request, 0.0)

    def answer(self, *tokens: int, reason: str | None = None, index: int = -1) -> None:
        """Let an engine answer the client's message ``index``; by default, the last message."""
        name, message = self.sent[index]
        notes = () if reason is None else (Note(0, finish_reason=reason),)
        step = StepDeltas(
            pack_ints([message.number]), pack_ints(tokens), pack_ints([len(tokens)]), notes
        )
        told, death = self.table.take_deltas(self.table.engines[name], Deltas(step, 1))
        assert not death
        for on_delta, delta in told:
            on_delta(delta)
        assert not self.table.continue_elsewhere(0.0)

    @property
    def groups(self) -> list[str]:
        return [name for name, _ in self.sent]


def test_a_long_prompt_is_computed_by_one_group_and_continued_by_another() -> None:
    world = World()
    world.place("a", 40)
    world.answer(7)
    world.answer(reason="length")
    world.answer(8, 9, reason="stop")
    (_, first), (group, second) = world.sent
    assert world.groups[0] == PREFILL and group in (FIRST, SECOND)
    assert (first.max_tokens, first.hands_over) == (1, True)
    assert (second.max_tokens, second.hands_over) == (7, False)
    assert second.prompt == first.prompt + pack_ints([7])
    assert (first.source, second.source) == ("", PREFILL)
    assert [delta.tokens for delta in world.told] == [[7], [8, 9]]
    assert [delta.finish_reason for delta in world.told] == [None, "stop"]
    assert len(world.table) == 0


def test_an_answer_that_stops_at_its_first_token_ends_at_once() -> None:
    world = World()
    world.place("a", 40)
    world.answer(7, reason="stop")
    assert len(world.sent) == 1 and world.told[-1].finish_reason == "stop"


def test_a_token_that_comes_with_the_end_is_not_lost() -> None:
    """An engine that keeps no files sends a request's last token in the message that ends the
    request.
    """
    world = World()
    world.place("a", 40)
    world.answer(7, reason="length")
    assert [delta.tokens for delta in world.told] == [[7]]
    assert world.told[0].finish_reason is None and len(world.sent) == 2


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (FROM - 1, {}),
        (40, {"count": 1}),
        (40, {"prompt_logprobs": 0}),
        (40, {"count": 1, "returns_embedding": True}),
    ],
)
def test_other_requests_are_computed_where_they_continue(
    length: int, options: dict[str, Any]
) -> None:
    world = World()
    world.place("a", length, **options)
    (_, message) = world.sent[0]
    assert world.groups[0] != PREFILL and not message.hands_over


@pytest.mark.parametrize(("role", "keeps"), [("prefill", True), ("decode", False)])
def test_a_request_for_which_a_router_has_chosen_stays_in_one_group(
    role: TransferRole, *, keeps: bool
) -> None:
    world = World()
    world.place("a", 40, role=role)
    (_, message) = world.sent[0]
    assert world.groups[0] != PREFILL and message.hands_over == keeps
    world.answer(7)
    world.answer(reason="length")
    assert len(world.sent) == 1 and world.told[-1].finish_reason == "length"


def test_a_prompt_that_another_group_has_cached_is_continued_there() -> None:
    world = World()
    world.place("a", 40)
    world.answer(7)
    world.answer(reason="length")
    group = world.groups[-1]
    world.answer(8, reason="stop")
    world.place("b", 40)
    assert world.groups[-1] == group
    world.place("c", 40, salt="private")
    assert world.groups[-1] == PREFILL


def test_groups_do_everything_if_no_group_of_the_other_role_is_left() -> None:
    world = World()
    world.table.engines[PREFILL].dead_because = "killed"
    world.place("a", 40)
    assert world.groups[-1] != PREFILL and not world.sent[-1][1].hands_over
    world.table.engines[PREFILL].dead_because = ""
    for name in (FIRST, SECOND):
        world.table.engines[name].dead_because = "killed"
    world.place("b", 41)
    assert world.groups[-1] == PREFILL and not world.sent[-1][1].hands_over


def test_a_request_whose_prefill_group_dies_continues_after_its_token() -> None:
    world = World()
    for name in ("x", "y"):  # the client sends no probes to engines that have run a request
        world.place(name, 4)
        world.answer(1, reason="stop")
    assert set(world.groups) == {FIRST, SECOND}
    world.place("a", 40)
    world.answer(7)
    assert not world.table.lose(world.table.engines[PREFILL], "killed", 0.0, is_over=False)
    world.table.look(0.0, None)
    name, message = world.sent[-1]
    assert name in (FIRST, SECOND) and message.prompt == pack_ints([*range(40), 7])


class FakeCopies:
    has_ended = False

    def have_ended(self, request: Request) -> bool:
        return self.has_ended


def test_the_end_of_a_request_waits_for_its_copies() -> None:
    copies, recipients, link = FakeCopies(), Recipients(), object()
    hand_overs = HandOvers(copies, recipients)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=1)
    requests = [submit(name, [1, 2], params) for name in "abc"]
    requests[0].hands_over = requests[1].hands_over = True
    for number, request in enumerate(requests):
        request.key = recipients.add(request.request_id, link, number)  # type: ignore[arg-type]
    outputs = StepOutputs(
        requests,
        np.array([request.key for request in requests], np.int32),
        np.arange(3, dtype=np.int32),
        finish_reasons={0: "length", 1: "length", 2: "length"},
    )
    kept = hand_overs.keep(outputs)
    assert dict(kept.finish_reasons) == {2: "length"} and len(hand_overs) == 2
    list(recipients.hand_out(kept))
    assert list(hand_overs.take_ready()) == []
    recipients.remove("b")  # the client has aborted the request
    copies.has_ended = True
    ((to, deltas),) = hand_overs.take_ready()
    (delta,) = deltas.each({0: "a"})
    assert to is link and delta == RequestDelta("a", finish_reason="length")
    assert len(hand_overs) == 0 and not recipients.find("a")


def test_a_later_request_with_the_same_id_is_not_ended() -> None:
    """After a client has lost its link to a group, it can submit the same request again."""
    copies, recipients, link = FakeCopies(), Recipients(), object()
    hand_overs = HandOvers(copies, recipients)  # type: ignore[arg-type]
    request = submit("a", [1, 2], SamplingParams(max_tokens=1))
    request.hands_over = True
    request.key = recipients.add("a", link, 0)  # type: ignore[arg-type]
    outputs = StepOutputs(
        [request], np.array([request.key], np.int32), np.array([5], np.int32), None
    )
    list(recipients.hand_out(hand_overs.keep(replace(outputs, finish_reasons={0: "length"}))))
    recipients.remove("a")
    list(recipients.hand_out(StepOutputs()))
    recipients.add("a", link, 1)  # type: ignore[arg-type]
    copies.has_ended = True
    assert list(hand_overs.take_ready()) == [] and recipients.find("a") == (link, 1)
    assert len(hand_overs) == 0


@dataclass(eq=False)
class FakeGroup:
    prefills: bool
    state: GroupState = GroupState.SERVING


@pytest.mark.parametrize("place", range(3))
def test_a_roll_leaves_as_many_prefill_groups_as_before(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a roll, a new group starts before the group that it replaces has drained."""
    config = make_config(
        {"model": "m", "kv": {"host_gib": 1}, "parallel": {"dp": 3, "prefill_groups": 1}}
    )
    groups: Any = object.__new__(ServingGroups)
    groups.groups, groups._leaving = [FakeGroup(i == place) for i in range(3)], None
    monkeypatch.setattr(serving_groups, "bundles_of_groups", lambda *arguments: None)
    monkeypatch.setattr(serving_groups.placement, "has_room", lambda *arguments: True)
    monkeypatch.setattr(
        groups,
        "_add",
        lambda planner, count: groups.groups.append(FakeGroup(groups._lacks_prefill(config, []))),
    )
    monkeypatch.setattr(groups, "_drain", lambda left: groups.groups.remove(left[0]))
    for group in list(groups.groups):
        groups._replace(group, SimpleNamespace(config=config))
    assert sum(group.prefills for group in groups.groups) == 1


@pytest.mark.parametrize(
    ("roles", "count", "left"),
    [
        ("ddd", 2, "dd"),
        ("ddp", 2, "dp"),
        ("ppdd", 2, "pd"),
        ("ppdd", 3, "ppd"),
        ("pd", 1, "d"),
        ("pp", 1, "p"),
        ("pd", 5, "pd"),
    ],
)
def test_fewer_groups_keep_both_roles(roles: str, count: int, left: str) -> None:
    groups: Any = [FakeGroup(role == "p") for role in roles]
    drained = serving_groups.surplus(groups, count)
    kept = [group for group in groups if group not in drained]
    assert "".join("p" if group.prefills else "d" for group in kept) == left
