"""An engine's sockets accept only peers on the engine's node and peers with valid keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.wire.addresses import Address, Endpoint, Listener, Place, open_meeting
from dist_aclgraph.actors.wire.engine_link import EngineLink
from dist_aclgraph.actors.wire.messages import Goodbye, Hello, protocol
from dist_aclgraph.actors.wire.remote_steps import TOPIC
from dist_aclgraph.actors.wire.step_channel import StepReceiver, StepSender
from dist_aclgraph.errors import EngineDeadError, PlacementError, WorkerStartTimeoutError
from tests.actors.leftovers import wait_until
from tests.actors.loop_group import NODE, TOKEN, WAIT_S, Group, assert_serves
from tests.actors.strangers import (
    NUM_JUNK,
    STRANGERS,
    Stranger,
    refusal_of,
    send_frames,
    send_raw,
    without_keys,
)
from tests.deployments import Answer, greedy_params

HOST, ELSEWHERE = "127.0.0.1", "other node"

MakeListener = Callable[..., Listener]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path, clients_host=HOST, max_model_len=8192, num_blocks=600)
    yield made
    made.close()


def test_peers_on_the_engines_node_connect_by_a_socket_file(tmp_path: Path) -> None:
    file, tcp = Endpoint(f"ipc://{tmp_path}/x"), Endpoint("tcp://10.0.0.1:7")
    address = Address(NODE, file, tcp)

    assert address.seen_from(NODE) is file
    assert address.seen_from(ELSEWHERE) is tcp


def test_an_engine_without_a_port_is_unreachable_from_a_later_node_and_the_error_has_a_remedy(
    tmp_path: Path,
) -> None:
    address = Address(NODE, Endpoint(f"ipc://{tmp_path}/x"))

    with pytest.raises(PlacementError, match="start the deployment again"):
        address.seen_from(ELSEWHERE)


def test_a_printed_address_contains_no_secret(group: Group) -> None:
    tcp = group.clients_at.tcp
    assert tcp is not None and tcp.keys is not None

    assert tcp.keys.client_secret.decode() not in repr(group.clients_at)


def test_clients_of_both_kinds_are_served_at_once(group: Group) -> None:
    here = EngineClient([group.clients_at], TOKEN, node_id=NODE, link_s=WAIT_S)
    there = EngineClient([group.clients_at], TOKEN, node_id=ELSEWHERE, link_s=WAIT_S)
    try:
        assert_serves(here, "a")
        assert_serves(there, "b")
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_client_without_the_right_keys_is_refused_and_learns_it(
    group: Group, stranger: Stranger
) -> None:
    endpoint = stranger(group.clients_at.seen_from(ELSEWHERE))

    assert "refused the connection: the keys" in refusal_of(endpoint)


def test_a_link_learns_of_a_refusal_that_comes_before_it_sends(
    group: Group, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """If a client was paused, its connection can be refused before the client has sent its first
    message.
    """
    endpoint = without_keys(group.clients_at.seen_from(ELSEWHERE))
    link = EngineLink(context, endpoint, Hello(TOKEN, "client", protocol()), WAIT_S)
    socket, _ = link.sockets
    wait_until(lambda: not socket.poll(0, zmq.POLLOUT), "ZeroMQ keeps the connection")

    link.send(Goodbye())

    with pytest.raises(EngineDeadError, match="refused the connection: the keys"):
        list(link.receive())
    link.close()


def test_a_token_is_asked_for_beside_the_keys(group: Group) -> None:
    assert "wrong token" in refusal_of(group.clients_at.seen_from(ELSEWHERE), "guess")


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_no_worker(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], stranger: Stranger
) -> None:
    sender = StepSender((0,), Place(NODE, str(tmp_path), HOST))
    address = sender.address_for(ELSEWHERE, 0)
    plans, results = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    plans.setsockopt(zmq.SUBSCRIBE, TOPIC.pack(0))
    results.setsockopt(zmq.IMMEDIATE, 1)  # sending fails if there is no connection
    stranger(address.plans).connect(plans)
    stranger(address.results).connect(results)

    with pytest.raises(WorkerStartTimeoutError):
        sender.wait_for_workers(0.5, lambda: None)
    with pytest.raises(zmq.Again):
        results.send(b"junk", zmq.NOBLOCK)

    receiver = StepReceiver(address)
    sender.wait_for_workers(WAIT_S, lambda: None)
    receiver.close()
    sender.close(1)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_no_peer_connects_while_no_thread_checks_keys(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], stranger: Stranger
) -> None:
    listener = Listener(context, Place(NODE, str(tmp_path), HOST))
    owned, peer = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    endpoint = listener.bind(owned, "s").seen_from(ELSEWHERE)
    listener.close()
    peer.setsockopt(zmq.IMMEDIATE, 1)

    stranger(endpoint).connect(peer)

    assert not peer.poll(1000, zmq.POLLOUT)


def test_keys_of_clients_open_no_step_channel(
    tmp_path: Path, group: Group, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    (tmp_path / "steps of").mkdir()
    sender = StepSender((0,), Place(NODE, str(tmp_path / "steps of"), HOST))
    plans_at = sender.address_for(ELSEWHERE, 0).plans
    plans = context.socket(zmq.SUB)
    plans.setsockopt(zmq.SUBSCRIBE, TOPIC.pack(0))
    replace(plans_at, keys=group.clients_at.seen_from(ELSEWHERE).keys).connect(plans)

    with pytest.raises(WorkerStartTimeoutError):
        sender.wait_for_workers(0.5, lambda: None)
    sender.close(1)


@pytest.mark.slow
def test_junk_at_the_ports_harms_no_stream(group: Group) -> None:
    endpoint = group.clients_at.seen_from(ELSEWHERE)
    client = EngineClient([Address(NODE, endpoint)], TOKEN, node_id=NODE, link_s=3 * WAIT_S)
    answer = Answer()
    client.submit("r", [1, 2, 3], greedy_params(2000), [], answer.take)
    work = [
        threading.Thread(target=send_raw, args=(endpoint.url, NUM_JUNK)),
        threading.Thread(target=send_frames, args=(endpoint, zmq.DEALER, NUM_JUNK)),
        *(
            threading.Thread(
                target=send_frames, args=(stranger(endpoint), zmq.DEALER, NUM_JUNK // 10)
            )
            for stranger in STRANGERS
        ),
    ]
    for thread in work:
        thread.start()

    assert answer.ended.wait(240)
    assert (answer.finish_reason, len(answer.tokens)) == ("length", 2000), answer.error
    for thread in work:
        thread.join(240)
        assert not thread.is_alive()
    assert_serves(client, "next")
    client.close()


# ---- ports


def test_sockets_listen_in_the_range_at_one_address(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with open_meeting(HOST, None, 1.0) as found:
        free = found.getsockname()[1]
    listener = Listener(context, Place(NODE, str(tmp_path), HOST, range(free, free + 20)))
    owned = [context.socket(zmq.PULL) for _ in range(3)]

    urls = [listener.bind(each, f"s{i}").seen_from(ELSEWHERE).url for i, each in enumerate(owned)]

    assert len(set(urls)) == 3
    assert all(url.startswith(f"tcp://{HOST}:") for url in urls)
    assert all(free <= int(url.rpartition(":")[2]) < free + 20 for url in urls)
    listener.close()


def test_a_range_that_is_taken_is_an_error_that_says_what_to_do(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with open_meeting(HOST, None, 1.0) as taken:
        port = taken.getsockname()[1]
        listener = Listener(context, Place(NODE, str(tmp_path), HOST, range(port, port + 1)))

        with pytest.raises(PlacementError, match=rf"{port}-{port} is free.*widen cluster\.ports"):
            listener.bind(context.socket(zmq.PULL), "s")
        with pytest.raises(PlacementError, match="widen cluster"):
            open_meeting(HOST, range(port, port + 1), 0.5)
    listener.close()


def test_a_port_that_is_taken_is_tried_until_it_is_free() -> None:
    taken = open_meeting(HOST, None, 1.0)
    port = taken.getsockname()[1]
    threading.Timer(1.0, taken.close).start()

    with open_meeting(HOST, range(port, port + 1), 60.0) as opened:
        assert opened.getsockname() == (HOST, port)


def test_the_next_port_is_taken_where_one_is_in_use() -> None:
    with open_meeting(HOST, None, 1.0) as taken:
        port = taken.getsockname()[1]
        with open_meeting(HOST, range(port, port + 50), 1.0) as opened:
            assert port < opened.getsockname()[1] < port + 50


def test_an_address_of_another_machine_is_refused(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    listener = Listener(context, Place(NODE, str(tmp_path), "203.0.113.1", remedy="change it"))

    with pytest.raises(PlacementError, match="no address of this machine; change it"):
        listener.bind(context.socket(zmq.PULL), "s")
    listener.close()
