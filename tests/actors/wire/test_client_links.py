"""What happens to requests if the engine, the client or the connection between them fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.actors.wire.messages import (
    Deltas,
    EngineStatus,
    Goodbye,
    GroupEntry,
    GroupList,
    Hello,
    Refused,
    RequestDelta,
    encoder,
    from_engine_decoder,
    protocol,
)
from dist_aclgraph.errors import EngineDeadError
from tests.actors.leftovers import wait_until
from tests.actors.loop_group import (
    NODE,
    TOKEN,
    WAIT_S,
    Group,
    RawClient,
    assert_serves,
    make_submit,
)
from tests.actors.strangers import NUM_JUNK
from tests.deployments import Answer, greedy_params

NEVER_S = 600.0  # a time limit that no test reaches

MakeGroup = Callable[..., Group]
MakeClient = Callable[..., EngineClient]


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[MakeGroup]:
    groups: list[Group] = []

    def make(**options: Any) -> Group:
        directory = tmp_path / str(len(groups))
        directory.mkdir()
        groups.append(Group(directory, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    clients: list[EngineClient] = []

    def make(*addresses: Endpoint, link_s: float = WAIT_S) -> EngineClient:
        clients.append(
            EngineClient(
                [Address(NODE, endpoint) for endpoint in addresses],
                TOKEN,
                node_id=NODE,
                link_s=link_s,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def owns_nothing(group: Group) -> bool:
    return group.scheduler.num_requests == 0


class HeldReader(Answer):
    """A reader of output tokens that can block the client's I/O thread.

    After a call of ``hold``, the thread blocks at the next delta until ``let_go`` is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_held = threading.Event()
        self.let_go = threading.Event()
        self._holds = threading.Event()

    def take(self, delta: RequestDelta) -> None:
        super().take(delta)
        if self._holds.is_set():
            self.is_held.set()
            assert self.let_go.wait(NEVER_S)

    def hold(self) -> None:
        self._holds.set()
        assert self.is_held.wait(WAIT_S)


def submit_many(client: EngineClient, count: int, num_tokens: int) -> list[Answer]:
    answers = [HeldReader(), *(Answer() for _ in range(count - 1))]
    for i, answer in enumerate(answers):
        client.submit(f"r{i}", [i, 2, 3], greedy_params(num_tokens), [], answer.take)
    return answers


def test_a_client_that_is_held_for_a_while_misses_no_delta(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    group = make_group(max_model_len=1024, num_blocks=200, link_s=NEVER_S)
    client = make_client(group.address, link_s=NEVER_S)
    # Four of 60 requests run at a time, so the engine sends 60 * 160 / 4 = 2,400 messages.
    reader, *others = submit_many(client, 60, 160)
    wait_until(lambda: group.scheduler.num_requests == 60, "not all requests are there")
    reader.hold()

    # Wait until the engine has sent all deltas. The client reads no delta during this wait.
    deadline_s = time.monotonic() + 120
    while not owns_nothing(group):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    reader.let_go.set()

    for answer in (reader, *others):
        assert answer.ended.wait(180)
        assert (answer.finish_reason, len(answer.tokens)) == ("length", 160), answer.error


def test_a_client_that_leaves_too_much_unread_is_cut_off_and_told(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    group = make_group(max_model_len=8192, num_blocks=600, max_unread_bytes=2000, link_s=WAIT_S)
    client = make_client(group.address, link_s=WAIT_S)
    answer = HeldReader()
    client.submit("r", [1, 2, 3], greedy_params(6000), [], answer.take)
    answer.hold()

    wait_until(lambda: owns_nothing(group), "nobody was cut off")
    answer.let_go.set()

    assert answer.ended.wait(WAIT_S)
    assert (answer.finish_reason, answer.error_kind) == ("error", "EngineDeadError")
    assert "unread" in answer.error
    assert 0 < len(answer.tokens) < 6000


def test_a_step_longer_than_any_silence_harms_nobody(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    group = make_group(stall_at=10, stall_s=4.0, link_s=1.0)
    client = make_client(group.address, link_s=1.0)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(40), [], answer.take)

    while not answer.ended.wait(0.05):
        client.raise_if_dead()

    assert (answer.finish_reason, len(answer.tokens)) == ("length", 40), answer.error


def _serve_pulses(address: str, received: Any) -> None:
    """Run an engine that accepts requests and answers heartbeats, but computes nothing. It runs
    until it is killed.
    """
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    while True:
        routing_id, frame = router.recv_multipart()
        router.send_multipart([routing_id, encoder.encode(EngineStatus())])
        if b"submit" in frame:
            received.set()


def test_a_killed_engine_is_known_without_waiting_for_its_silence(
    tmp_path: Path, make_client: MakeClient
) -> None:
    spawn = multiprocessing.get_context("spawn")
    received, address = spawn.Event(), f"ipc://{tmp_path}/clients"
    engine = spawn.Process(target=_serve_pulses, args=(address, received), daemon=True)
    engine.start()
    client = make_client(Endpoint(address), link_s=NEVER_S)
    answer = Answer()
    client.submit("r", [1], greedy_params(5), [], answer.take)
    assert received.wait(180)

    os.kill(engine.pid or 0, signal.SIGKILL)

    assert answer.ended.wait(WAIT_S)
    assert "its process is gone" in answer.error
    with pytest.raises(EngineDeadError, match="gone"):
        client.submit("s", [1], greedy_params(5), [], answer.take)
    engine.join()


def _leave(group: Group, raw: RawClient) -> None:
    raw.send(encoder.encode(Goodbye()))


def _come_again(group: Group, raw: RawClient) -> None:
    group.later.append(RawClient(group.address))


def _send_junk(group: Group, raw: RawClient) -> None:
    raw.send(b"\xff\xfe junk")


def _vanish(group: Group, raw: RawClient) -> None:
    raw.close()


@pytest.mark.parametrize("end", [_leave, _come_again, _send_junk, _vanish])
def test_a_link_that_ends_takes_its_requests_with_it(make_group: MakeGroup, end: Any) -> None:
    group = make_group(max_model_len=8192, num_blocks=600, link_s=NEVER_S)
    raw = RawClient(group.address)
    raw.send(make_submit(max_tokens=8000))
    assert isinstance(raw.receive(), Deltas)

    end(group, raw)

    wait_until(lambda: owns_nothing(group), "the request goes on for nobody")
    raw.close()


def test_a_client_that_is_silent_loses_its_requests_and_is_told(make_group: MakeGroup) -> None:
    group = make_group(max_model_len=8192, num_blocks=600, link_s=0.5)
    raw = RawClient(group.address)
    raw.send(make_submit(max_tokens=8000))

    wait_until(lambda: owns_nothing(group), "the request goes on for nobody")
    while isinstance(message := raw.receive(), Deltas):
        pass

    assert isinstance(message, Refused)
    assert "silent" in message.reason
    raw.close()


def test_closing_a_client_aborts_what_it_had(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    group = make_group(max_model_len=8192, num_blocks=600, link_s=NEVER_S)
    client = make_client(group.address)
    answer = Answer()
    client.submit("r", [1, 2], greedy_params(8000), [], answer.take)
    assert answer.began.wait(WAIT_S)

    client.close()

    wait_until(lambda: owns_nothing(group), "the request goes on for nobody")
    assert answer.finish_reason == "error"


def test_a_callback_that_raises_ends_its_request_alone(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    group = make_group()
    client = make_client(group.address)
    good, bad = Answer(), Answer()

    def refuse(delta: RequestDelta) -> None:
        bad.take(delta)
        raise ValueError("I do not like it")

    client.submit("good", [1], greedy_params(60), [], good.take)
    client.submit("bad", [2], greedy_params(100), [], refuse)

    assert bad.ended.wait(WAIT_S)
    assert "I do not like it" in bad.error
    assert good.ended.wait(WAIT_S)
    assert (good.finish_reason, len(good.tokens)) == ("length", 60)
    assert len(bad.tokens) == 1
    assert_serves(client, "next")


def test_a_loop_that_is_stuck_on_its_host_is_said_to_be(make_group: MakeGroup) -> None:
    group = make_group(turn_s=0.0)

    assert "stuck on its host" in group.loop.failure_now()


def test_a_loop_is_not_blamed_for_a_process_that_stood_still(make_group: MakeGroup) -> None:
    group = make_group(turn_s=0.0, is_held=lambda: False)

    assert group.loop.failure_now() == ""


def test_an_engine_whose_group_is_not_its_own_any_more_serves_nobody(
    make_group: MakeGroup, make_client: MakeClient
) -> None:
    held = threading.Event()
    held.set()
    group = make_group(max_model_len=8192, num_blocks=600, is_held=held.is_set)
    client = make_client(group.address, link_s=1.0)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(8000), [], answer.take)
    assert answer.began.wait(WAIT_S)

    held.clear()

    assert answer.ended.wait(WAIT_S)
    assert "silent" in answer.error
    late = make_client(group.address, link_s=1.0)
    wait_until(lambda: bool(late.capacity().lost), "it is used")
    steps = group.loop.report()["metrics"]["steps"]
    time.sleep(0.3)
    assert group.loop.report()["metrics"]["steps"] == steps
    held.set()
    wait_until(lambda: not late.capacity().lost, "it is not used again")
    assert_serves(late)


JUNK = (
    b"",
    b"garbage",
    b"\x81\xa4type\xa4\xff\xfe\xfd\xfc",  # not UTF-8
    b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 10_000,  # a value that is nested too deeply
    encoder.encode({"type": "hello"}),
    encoder.encode({"type": "submit", "request_id": 3}),
)


def groups_of(group: Group, version: int, *, is_draining: bool = False) -> GroupList:
    return GroupList(version, (GroupEntry("0", group.clients_at, 32, 16, is_draining),))


def test_a_new_client_gets_the_group_list_as_its_first_message(make_group: MakeGroup) -> None:
    group = make_group()
    earlier = RawClient(group.address, name="earlier")
    group.later.append(earlier)
    group.loop.set_groups(groups_of(group, 1, is_draining=True))
    assert earlier.receive().version == 1

    with zmq.Context() as context, context.socket(zmq.DEALER) as new:
        new.setsockopt(zmq.LINGER, 0)
        group.address.connect(new)
        new.send(encoder.encode(Hello(TOKEN, "new", protocol())))

        assert new.poll(WAIT_S * 1000)
        assert isinstance(from_engine_decoder.decode(new.recv()), GroupList)


def test_a_client_with_other_messages_is_refused(make_group: MakeGroup) -> None:
    group = make_group()

    with zmq.Context() as context, context.socket(zmq.DEALER) as new:
        new.setsockopt(zmq.LINGER, 0)
        group.address.connect(new)
        new.send(encoder.encode(Hello(TOKEN, "new", protocol="older")))

        assert new.poll(WAIT_S * 1000)
        reply = from_engine_decoder.decode(new.recv())
        assert isinstance(reply, Refused) and "another version of dist_aclgraph" in reply.reason


def test_lists_of_groups_that_overtake_each_other_leave_the_latest(make_group: MakeGroup) -> None:
    group = make_group()
    for version in (2, 1):
        group.loop.set_groups(groups_of(group, version))

    client = RawClient(group.address)
    group.later.append(client)

    assert client.receive().version == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_a_flood_of_junk_ends_nothing_but_its_senders_link(
    make_group: MakeGroup, make_client: MakeClient, is_known: bool
) -> None:
    group = make_group(max_model_len=8192, num_blocks=600, link_s=NEVER_S)
    client = make_client(group.address, link_s=NEVER_S)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(2000), [], answer.take)
    raw = RawClient(group.address, TOKEN if is_known else "guess")

    for i in range(NUM_JUNK):
        raw.send(JUNK[i % len(JUNK)])

    assert answer.ended.wait(240)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 2000), answer.error
    assert_serves(client, "next")
    raw.close()
