"""While no group serves, requests wait. They continue later, with the same tokens as without the
wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.outage import Outlook, Recovery
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList, error_of
from dist_aclgraph.arrays.ints import INT_BYTES
from dist_aclgraph.errors import EngineDeadError, EngineUnavailableError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import WAIT_S, until
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine
from tests.serve.resume.test_resumed_requests import PROMPT, by_position, wanted

LINK_S = 10.0  # so long that no engine counts as silent, even on a busy machine
LOADING = "LOADING 3 of 9"


@dataclass
class Deployment:
    """The engines of a deployment, and a client that at first knows only the address of the first
    engine.

    The client learns the other addresses from the controller. The function ``ask`` stands for the
    controller.
    """

    wait_s: float = 60.0
    outlook: Outlook = field(default_factory=lambda: Outlook(progress=LOADING))
    engines: list[FakeEngine] = field(default_factory=list)
    deltas: dict[str, queue.Queue[RequestDelta]] = field(default_factory=dict)
    num_asked: int = 0
    holds_answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.holds_answers.set()
        first = self.new_engine()
        self.client = EngineClient(
            [first.address],
            TOKEN,
            node_id=NODE,
            link_s=LINK_S,
            recovery=Recovery(self.ask, self.wait_s),
        )
        until(lambda: all(engine.link.is_welcome for engine in self.client._known()))

    def ask(self) -> Outlook:
        self.num_asked += 1
        self.holds_answers.wait()
        return self.outlook

    def new_engine(self, token: str = TOKEN) -> FakeEngine:
        engine = FakeEngine(by_position, step_s=0.005, token=token)
        self.engines.append(engine)
        return engine

    def lose(self) -> None:
        self.engines[-1].close()
        until(lambda: bool(self.client.outage()))

    def replace(self) -> FakeEngine:
        """Replace all groups by a new group. Only the controller can tell clients the new group's
        address.
        """
        engine = self.new_engine()
        number = len(self.engines) - 1
        entry = GroupEntry(str(number), engine.address, 100, 16)
        self.outlook = Outlook(GroupList(number, (entry,)))
        return engine

    def begin_anew(self) -> FakeEngine:
        """Replace this deployment by another one, which numbers its groups from 0 again."""
        engine = self.new_engine(token="another-token")
        groups = GroupList(1, (GroupEntry("0", engine.address, 100, 16),))
        self.outlook = Outlook(groups, token="another-token")
        return engine

    def submit(self, name: str, count: int) -> None:
        deltas = self.deltas[name] = queue.Queue()
        params = SamplingParams(max_tokens=count)
        self.client.submit(name, PROMPT, params, (), deltas.put, seed=11)

    def collect(self, name: str, count: int | None = None) -> tuple[list[int], RequestDelta]:
        """Read ``count`` tokens of the request, or all tokens if ``count`` is None."""
        tokens: list[int] = []
        while True:
            delta = self.deltas[name].get(timeout=WAIT_S)
            tokens += delta.tokens
            if delta.finish_reason is not None or len(tokens) == count:
                return tokens, delta

    def close(self) -> None:
        self.holds_answers.set()
        self.client.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def one() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.close()


@pytest.fixture
def hasty() -> Iterator[Deployment]:
    deployment = Deployment(wait_s=0.3)
    yield deployment
    deployment.close()


def test_a_request_waits_for_the_group_that_comes_up_and_goes_on_there(one: Deployment) -> None:
    one.submit("a", 400)
    before, _ = one.collect("a", 20)
    one.lose()
    one.client.raise_if_dead()
    assert one.client.num_held == len(one.client._table) == 1

    one.replace()

    after, last = one.collect("a")
    assert before + after == wanted(400)
    assert last.finish_reason == "length"
    assert one.client.num_resumed == 1
    assert one.client.num_held == 0
    assert one.client.outage() == ""


def test_a_link_that_comes_back_to_the_only_engine_loses_no_token(one: Deployment) -> None:
    one.submit("a", 400)
    before, _ = one.collect("a", 20)

    one.engines[0].skipped = 1

    after, _ = one.collect("a")
    assert before + after == wanted(400)


def test_new_requests_wait_too_and_go_last(one: Deployment) -> None:
    one.submit("few", 100_000)
    one.collect("few", 20)
    one.submit("more", 100_000)
    one.collect("few", 100)
    one.submit("most", 100_000)
    one.engines[0].step_s = 600.0
    one.lose()
    one.submit("new", 100)
    assert one.client.num_held == 4

    engine = one.replace()

    until(lambda: len(engine.requests) == 4)
    lengths = [len(submit.prompt) // INT_BYTES for submit in engine.requests]
    assert lengths == sorted(lengths, reverse=True)
    assert [submit.request_id for submit in engine.requests] == ["few", "more", "most", "new"]


def test_the_client_reports_the_progress_of_the_next_group_while_requests_wait(
    one: Deployment,
) -> None:
    one.lose()

    until(lambda: LOADING in one.client.outage())

    assert "connection" in one.client.outage()
    seconds = one.client.outage_seconds()
    assert seconds > 0
    until(lambda: one.client.outage_seconds() > seconds)
    one.replace()
    until(lambda: not one.client.outage())
    until(lambda: one.client.outage_seconds() == one.client.outage_seconds())


def test_a_request_that_has_waited_too_long_may_be_sent_again_later(hasty: Deployment) -> None:
    hasty.submit("a", 100_000)
    hasty.collect("a", 20)
    hasty.lose()

    _, last = hasty.collect("a")

    assert type(error_of(last)) is EngineUnavailableError
    assert "recovery.wait_s = 0.3 s" in last.error
    hasty.client.raise_if_dead()
    assert len(hasty.client._table) == 0


def test_requests_end_with_the_cause_once_no_group_will_come(one: Deployment) -> None:
    one.submit("a", 100_000)
    one.collect("a", 20)
    one.lose()
    one.submit("b", 10)

    one.outlook = Outlook(failure="rank 1 in SERVING: it died; no restart is left")

    for name in ("a", "b"):
        last = one.collect(name)[1]
        assert isinstance(error_of(last), EngineDeadError)
        assert last.error == one.outlook.failure
    with pytest.raises(EngineDeadError, match="no restart is left"):
        one.client.raise_if_dead()
    with pytest.raises(EngineDeadError, match="no restart is left"):
        one.submit("c", 10)


def test_a_controller_that_is_gone_ends_the_wait(one: Deployment) -> None:
    def gone() -> Outlook:
        raise EngineDeadError("the controller: the process died")

    one.ask = gone  # type: ignore[method-assign]
    one.client._table.outage.outlook_poller._ask = gone  # type: ignore[union-attr]
    one.submit("a", 100_000)
    one.collect("a", 20)
    one.lose()

    assert "the controller" in one.collect("a")[1].error


def test_a_request_that_waits_can_be_aborted(one: Deployment) -> None:
    one.submit("a", 100_000)
    one.collect("a", 20)
    one.lose()

    one.client.abort("a")

    assert len(one.client._table) == 0
    engine = one.replace()
    until(lambda: not one.client.outage())
    one.submit("a", 5)
    assert one.collect("a")[0] == wanted(5)
    assert [submit.max_tokens for submit in engine.submitted] == [5]


def test_requests_go_on_in_another_deployment(one: Deployment) -> None:
    # After this loop, the version of this deployment's list is higher than the version of the next
    # deployment's list.
    for _ in range(3):
        one.lose()
        one.replace()
        until(lambda: not one.client.outage())
    one.submit("a", 400)
    before, _ = one.collect("a", 20)
    one.lose()
    anew = one.begin_anew()

    after, last = one.collect("a")

    assert before + after == wanted(400)
    assert last.finish_reason == "length"
    until(lambda: one.client.states() == {"0": "serving"})
    one.submit("b", 5)
    assert one.collect("b")[0] == wanted(5)
    assert [submit.request_id for submit in anew.requests] == ["a", "b"]


def test_a_request_of_which_groups_die_does_not_wait_for_a_third(one: Deployment) -> None:
    one.submit("a", 100_000)
    one.collect("a", 5)
    one.lose()
    second = one.new_engine()
    second.poison = "a"

    one.outlook = Outlook(GroupList(1, (GroupEntry("1", second.address, 100, 16),)))

    assert "2 engines died" in one.collect("a")[1].error


def test_a_request_whose_groups_die_together_is_not_the_cause(one: Deployment) -> None:
    """Both groups have run steps before they die. When one group has died, its request moves to the
    other group, which dies at once.
    """
    first, second = one.engines[0], one.new_engine()
    entries = [GroupEntry(str(i), e.address, 100, 16) for i, e in enumerate((first, second))]
    first.groups = GroupList(1, tuple(entries))
    until(lambda: list(one.client.states().values()) == ["serving", "serving"])
    for name in "ab":  # one request on each engine
        one.submit(name, 400)
        one.collect(name, 5)
    assert [engine.num_running for engine in one.engines] == [1, 1]
    lost = first if first.requests[0].request_id == "a" else second
    other = second if lost is first else first
    other.step_s = 3600.0

    lost.close()
    until(lambda: other.num_running == 2)
    other.close()
    one.replace()

    for name in "ab":
        assert one.collect(name)[0] == wanted(400)[5:]


def test_a_new_request_that_kills_the_engine_in_anothers_turn_is_the_cause(
    one: Deployment,
) -> None:
    one.submit("a", 400)
    one.collect("a", 5)
    one.lose()
    second = one.new_engine()
    second.step_s = 3600.0  # so long that "a" gets no token from this engine
    second.is_proving = True
    one.outlook = Outlook(GroupList(1, (GroupEntry("1", second.address, 100, 16),)))
    until(lambda: any(submit.request_id == "a" for submit in second.requests))
    one.submit("new", 100_000)
    until(lambda: len(second.requests) == 2)

    one.lose()
    one.replace()

    assert one.collect("a")[0] == wanted(400)[5:]


def test_suspects_that_wait_for_a_turn_also_wait_for_the_next_group(one: Deployment) -> None:
    names = [f"n{i}" for i in range(4)]
    for name in names:
        one.submit(name, 400)
        one.collect(name, 5)
    one.lose()
    second = one.new_engine()
    second.step_s = 3600.0  # so long that this engine never answers its probe
    one.outlook = Outlook(GroupList(1, (GroupEntry("1", second.address, 100, 16),)))
    until(lambda: second.num_running == 1)
    assert one.client.num_held == 4

    one.lose()
    one.replace()

    for name in names:
        assert one.collect(name)[0] == wanted(400)[5:]


def test_closing_ends_what_waits_while_a_question_hangs(one: Deployment) -> None:
    one.holds_answers.clear()
    one.submit("a", 100_000)
    one.collect("a", 20)
    one.lose()
    until(lambda: one.num_asked == 1)

    one.client.close()

    assert one.collect("a")[1].error == "the service is stopping"


def test_no_client_asks_the_controller_while_a_group_serves(one: Deployment) -> None:
    one.submit("a", 400)
    one.collect("a")

    assert one.num_asked == 0
