from __future__ import annotations

import queue
import threading

import msgpack
import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList, error_of
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.errors import EngineDeadError, InvalidParameterError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import WAIT_S, until
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine

LINK_S = 1.0
PARAMS = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture
def engine():
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def client(engine):
    client = EngineClient([engine.address], TOKEN, node_id=NODE, link_s=LINK_S)
    yield client
    client.close()


def collect(deltas: queue.Queue[RequestDelta]) -> tuple[list[int], RequestDelta]:
    """Collect the deltas of one request; return all its token ids, and its last delta."""
    ids: list[int] = []
    while True:
        delta = deltas.get(timeout=WAIT_S)
        ids += unpack_ints(delta.token_ids).tolist()
        if delta.finish_reason is not None:
            return ids, delta


def test_tokens_arrive_in_order_up_to_the_finish(client):
    deltas: queue.Queue[RequestDelta] = queue.Queue()

    client.submit("a", [1, 2, 3], PARAMS, (), deltas.put)

    ids, last = collect(deltas)
    assert ids == [1, 2, 3, 1, 2]
    assert last.finish_reason == "length"
    assert len(client._table) == 0


def test_a_stop_token_ends_the_request_and_is_delivered(client):
    deltas: queue.Queue[RequestDelta] = queue.Queue()

    client.submit("a", [1, 2, 3], PARAMS, (3,), deltas.put)

    ids, last = collect(deltas)
    assert (ids, last.finish_reason) == ([1, 2, 3], "stop")


def test_abort_reaches_the_engine_and_silences_the_request(client, engine):
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    client.submit("a", [1], SamplingParams(max_tokens=100000), (), deltas.put)
    deltas.get(timeout=WAIT_S)

    client.abort("a")

    until(lambda: engine.aborted == ["a"])
    assert (len(client._table), engine.num_running) == (0, 0)


LONG = SamplingParams(max_tokens=100000)


@pytest.fixture
def other():
    other = FakeEngine()
    yield other
    other.close()


def until_all_have_answered(client: EngineClient) -> None:
    """Wait until all groups have answered the client. Requests go only to groups that have
    answered.
    """
    until(lambda: all(engine.link.is_welcome for engine in client._known()))


@pytest.fixture
def both(engine, other):
    """Yield a client of two engines."""
    client = EngineClient([engine.address, other.address], TOKEN, node_id=NODE, link_s=LINK_S)
    until_all_have_answered(client)
    yield client
    client.close()


def list_groups(version: int, *engines: FakeEngine, draining: str = "") -> GroupList:
    entries = [
        GroupEntry(str(i), engine.address, 100, 16, is_draining=str(i) in draining)
        for i, engine in enumerate(engines)
    ]
    return GroupList(version, tuple(entries))


def test_equal_beginnings_go_to_one_engine_while_others_wait_no_less(both, engine, other):
    engine.groups = list_groups(1, engine, other)
    until(lambda: engine.last_beat.groups_version == 1)
    shared = list(range(400))

    for i in range(3):
        both.submit(f"shared{i}", [*shared, i], LONG, (), lambda delta: None)
    until(lambda: len(engine.submitted) + len(other.submitted) == 3)
    first, second = (engine, other) if engine.submitted else (other, engine)
    assert len(first.submitted) == 3
    for i in range(3):
        both.submit(f"own{i}", [1000 + i], LONG, (), lambda delta: None)
    until(lambda: len(second.submitted) == 3)

    routed = both.routed()[str(int(first is other))]
    assert (routed.routed_requests, routed.routed_cached_tokens) == (3, 2 * 400)


def test_a_client_counts_the_waiting_tokens_of_other_clients(both, engine, other):
    engine.others_tokens = 100_000
    both.submit("a", [1], LONG, (), lambda delta: None)
    until(lambda: engine.last_beat.waiting_tokens or other.last_beat.waiting_tokens)
    seen = len(engine.frames)
    # The engine answers each heartbeat before it reads the next one.
    until(lambda: len(engine.frames) > seen + 3)

    for i in range(4):
        both.submit(str(i), [1], LONG, (), lambda delta: None)

    until(lambda: len(engine.submitted) + len(other.submitted) == 5)
    assert len(other.submitted) >= 4


def test_an_engine_that_is_added_takes_requests(engine, client, other):
    client.submit("old", [1], LONG, (), lambda delta: None)

    engine.groups = list_groups(1, engine, other)

    until(lambda: client.capacity().serving == 2)
    until_all_have_answered(client)
    client.submit("new", [2], LONG, (), lambda delta: None)
    until(lambda: len(other.submitted) == 1)
    # The new engine also sends a list of groups. This list is older, so it changes nothing.
    other.groups = GroupList(0, ())
    until(lambda: other.last_beat.groups_version == 1)
    assert client.capacity().total == 2


def test_an_engine_that_drains_keeps_its_requests_and_gets_no_others(both, engine, other):
    answers: dict[str, queue.Queue[RequestDelta]] = {}
    for i in range(4):
        answers[f"r{i}"] = queue.Queue()
        both.submit(f"r{i}", [1, 2], SamplingParams(max_tokens=300), (), answers[f"r{i}"].put)
    until(lambda: len(engine.submitted) == len(other.submitted) == 2)

    engine.groups = other.groups = list_groups(1, engine, other, draining="0")

    # On the same link, the client confirms the list after its earlier requests. So the engine now
    # has these requests.
    until(lambda: engine.last_beat.groups_version == 1)
    assert both.capacity().by_state() == {"serving": 1, "draining": 1, "lost": 0}
    for i in range(4):
        both.submit(f"later{i}", [1, 2], PARAMS, (), lambda delta: None)
    until(lambda: len(other.submitted) == 6)
    assert len(engine.submitted) == 2
    other.groups = GroupList(2, (GroupEntry("1", other.address, 100, 16),))
    for deltas in answers.values():
        ids, last = collect(deltas)
        assert (len(ids), last.finish_reason) == (300, "length")
    until(lambda: both.capacity().total == 1)
    both.raise_if_dead()


def test_a_drained_engine_that_goes_is_no_loss(both, engine, other):
    engine.groups = other.groups = list_groups(1, engine, other, draining="0")
    until(lambda: both.capacity().draining == 1)

    engine.silent = True

    until(lambda: both.capacity().total == 1)
    assert both.capacity().lost == {}
    assert sum(both.num_losses().values()) == 0


def test_an_engine_that_dies_while_it_drains_is_a_loss(both, engine, other):
    both.submit("a", [1], LONG, (), lambda delta: None)
    until(lambda: engine.submitted or other.submitted)
    dying, draining = (engine, "0") if engine.submitted else (other, "1")
    engine.groups = other.groups = list_groups(1, engine, other, draining=draining)
    until(lambda: both.capacity().draining == 1)

    dying.silent = True

    until(lambda: both.num_losses()["silent"] == 1)


def test_a_dead_engine_gets_nothing_and_capacity_says_what_is_left(both, engine, other):
    engine.silent = True
    until(lambda: both.capacity().lost)

    for i in range(4):
        both.submit(str(i), [1], LONG, (), lambda delta: None)

    until(lambda: len(other.submitted) == 4)
    capacity = both.capacity()
    assert (capacity.serving, capacity.total, list(capacity.lost)) == (1, 2, ["0"])
    assert "silent" in capacity.lost["0"]


def test_requests_go_to_engines_that_have_answered_while_there_are_any(engine, tmp_path):
    nobody = Address(NODE, Endpoint(f"ipc://{tmp_path}/nobody"))
    client = EngineClient([nobody, engine.address], TOKEN, node_id=NODE, link_s=30.0)
    until(lambda: len(engine.frames) > 1)  # the client has sent a hello and then a heartbeat

    for i in range(4):
        client.submit(str(i), [i], LONG, (), lambda delta: None)

    until(lambda: len(engine.submitted) == 4)
    client.close()


def test_an_engine_that_leaves_while_it_is_asked_ends_nothing_else(
    both, engine, other, monkeypatch
):
    until(lambda: both.query("metrics").keys() == {"0", "1"})

    def while_one_leaves():
        yield 1000
        engine.groups = other.groups = list_groups(1, engine)
        until(lambda: both.capacity().total == 1)
        yield 1001

    monkeypatch.setattr(both._queries, "_ids", while_one_leaves())

    assert both.query("metrics").keys() == {"0"}
    assert not both._queries._open
    both.submit("later", [1], LONG, (), lambda delta: None)
    until(lambda: len(engine.submitted) == 1)


def test_an_engine_that_leaves_without_an_answer_is_not_waited_for(both, engine, other):
    other.silent = True
    answers: queue.Queue[dict] = queue.Queue()
    asking = threading.Thread(target=lambda: answers.put(both.query("metrics", timeout_s=60)))
    asking.start()
    until(lambda: any(b"query" in frame for frame in other.frames))

    engine.groups = list_groups(1, engine)

    assert answers.get(timeout=WAIT_S).keys() == {"0"}
    asking.join()


def test_requests_without_a_common_beginning_are_spread_evenly(engine):
    other = FakeEngine()
    client = EngineClient([engine.address, other.address], TOKEN, node_id=NODE, link_s=LINK_S)
    long = SamplingParams(max_tokens=100000)
    until_all_have_answered(client)
    for i in range(4):
        client.submit(str(i), [1], long, (), lambda delta: None)

    until(lambda: len(engine.submitted) + len(other.submitted) == 4)
    assert len(engine.submitted) == len(other.submitted) == 2
    client.close()
    other.close()


def test_a_silent_engine_ends_its_requests_with_a_typed_error(client, engine):
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    client.submit("a", [1], SamplingParams(max_tokens=100000), (), deltas.put)
    deltas.get(timeout=WAIT_S)

    engine.silent = True

    _, last = collect(deltas)
    assert isinstance(error_of(last), EngineDeadError)
    with pytest.raises(EngineDeadError, match="silent"):
        client.raise_if_dead()
    with pytest.raises(EngineDeadError):
        client.submit("b", [1], PARAMS, (), deltas.put)


def test_a_missing_message_of_the_engine_ends_the_request_at_both_ends(client, engine):
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    client.submit("a", [1], SamplingParams(max_tokens=100000), (), deltas.put)
    deltas.get(timeout=WAIT_S)

    engine.skipped = 1

    _, last = collect(deltas)
    assert isinstance(error_of(last), EngineDeadError)
    assert "is lost" in last.error
    until(lambda: engine.num_running == 0)


def test_requests_fail_if_the_client_cannot_connect_again(both, engine, other, monkeypatch):
    answers: list[queue.Queue[RequestDelta]] = [queue.Queue() for _ in range(2)]
    for i, deltas in enumerate(answers):
        both.submit(str(i), [i], LONG, (), deltas.put)
    until(lambda: engine.submitted and other.submitted)

    def refuse(*_):
        raise OSError("Too many open files")

    monkeypatch.setattr(Endpoint, "connect", refuse)  # called when a client opens a new link
    engine.silent = True

    errors = [collect(deltas)[1].error for deltas in answers]
    assert any("Too many open files" in error for error in errors)
    with pytest.raises(EngineDeadError):
        both.raise_if_dead()


def test_an_engine_that_answers_again_is_used_again(client, engine):
    engine.silent = True
    with pytest.raises(EngineDeadError):
        client.query("report", timeout_s=2)
    engine.silent = False
    deltas: queue.Queue[RequestDelta] = queue.Queue()

    def alive() -> bool:
        try:
            client.raise_if_dead()
        except EngineDeadError:
            return False
        return True

    until(alive)
    client.submit("a", [7], PARAMS, (), deltas.put)
    assert collect(deltas)[0] == [7] * 5


def test_being_cut_off_again_and_again_is_no_reason_to_give_a_request_up(both, engine, other):
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    both.submit("a", [7], SamplingParams(max_tokens=2000, temperature=0.0), (), deltas.put)

    for number in range(4):
        until(lambda: engine.num_running + other.num_running == 1)
        until(lambda: not any(known.link.is_lost for known in both._known()))
        until_all_have_answered(both)
        running = engine if engine.num_running else other
        running.refusal = "the client was silent for 1.1 s"
        until(lambda count=number + 1: both.num_resumed == count)

    engine.step_s = other.step_s = 0.0
    ids, last = collect(deltas)
    assert (ids, last.finish_reason) == ([7] * 2000, "length")
    assert both.num_resumed == 4


def test_a_wrong_token_is_refused_with_the_reason(engine):
    client = EngineClient([engine.address], "guess", node_id=NODE, link_s=LINK_S)
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    try:
        client.submit("a", [1], PARAMS, (), deltas.put)
        assert "wrong token" in str(error_of(collect(deltas)[1]))
    except EngineDeadError as e:  # the refusal arrived before ``submit`` was called
        assert "wrong token" in str(e)
    assert engine.submitted == []
    client.close()


def test_query_returns_one_answer_per_engine(client):
    assert client.query("report") == {"0": {"epoch": 1}}


def test_close_ends_running_requests(engine):
    client = EngineClient([engine.address], TOKEN, node_id=NODE, link_s=LINK_S)
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    client.submit("a", [1], SamplingParams(max_tokens=100000), (), deltas.put)

    client.close()

    assert collect(deltas)[1].error_kind == "EngineDeadError"


def test_submission_checks_the_id_and_the_token_limit(client):
    client.submit("a", [1], SamplingParams(max_tokens=100000), (), lambda delta: None)

    with pytest.raises(InvalidParameterError, match="in use"):
        client.submit("a", [1], PARAMS, (), lambda delta: None)
    with pytest.raises(InvalidParameterError, match="max_tokens"):
        client.submit("b", [1], SamplingParams(max_tokens=None), (), lambda delta: None)


def test_any_message_pack_library_reads_the_wire(client, engine):
    deltas: queue.Queue[RequestDelta] = queue.Queue()
    client.submit("a", [1, 256], PARAMS, (9,), deltas.put)
    collect(deltas)

    messages = [msgpack.unpackb(frame) for frame in engine.frames]
    assert messages[0].keys() == {"type", "token", "client", "protocol"}
    assert (messages[0]["type"], messages[0]["token"]) == ("hello", TOKEN)
    (submit,) = [m for m in messages if m["type"] == "submit"]
    assert submit["prompt"] == b"\x01\0\0\0\x00\x01\0\0"
    assert (submit["max_tokens"], submit["stop_token_ids"]) == (5, [9])
    answered = [msgpack.unpackb(frame) for frame in engine.sent_frames]
    first = next(m for m in answered if m["type"] == "deltas")
    assert first["step"] == {"numbers": bytes(4), "token_ids": b"\x01\0\0\0"}
