"""A full service refuses a request at once, before it reads the request's body."""

from __future__ import annotations

import json
import re
import socket

import pytest

from tests.serve.conftest import serving, until
from tests.serve.many_clients import ask_all
from tests.serve.openai.test_errors import CHAT, HI, MODEL, TEXT, assert_error

NUM_PLACES = 4 + 16  # scheduler.max_waiting + scheduler.max_num_seqs
NUM_CLIENTS = 1000
HANGING = {"model": MODEL, "prompt": [70], "max_tokens": 2000, "stream": True}


@pytest.fixture(scope="module")
def full():
    """Yield a service in which endless streams use all slots."""
    with serving(**{"scheduler.max_waiting": 4}) as service:
        service.engine.step_s = 0.2
        replies = [
            service.http.stream("POST", TEXT, json={**HANGING, "n": NUM_PLACES // 2}),
            service.http.stream("POST", TEXT, json={**HANGING, "n": NUM_PLACES // 2}),
        ]
        with replies[0], replies[1]:
            until(lambda: service.engine.num_running == NUM_PLACES, 30.0)
            yield service


def test_a_full_service_refuses_and_says_when_to_come_back(full):
    reply = full.http.post(CHAT, json={"model": MODEL, "messages": HI})

    error = assert_error(reply, 503)
    assert reply.headers["retry-after"] == "1"
    assert f"of {NUM_PLACES} that may" in error["message"]
    assert full.http.get("/health").status_code == 200


def test_a_refusal_reads_nothing(full):
    """The body is not valid JSON, but the refusal names only the used slots, because the body is
    not read.
    """
    assert_error(full.http.post(CHAT, content=b"{" * 1000), 503)


def test_a_place_that_becomes_free_is_given_away(own_service):
    service = own_service
    slots = service.state.slots

    for _ in range(3):
        service.http.post(TEXT, json={"model": MODEL, "prompt": [70], "n": 5, "max_tokens": 1})
        service.http.post(TEXT, content=b"nonsense")

    until(lambda: slots.taken == 0)


def test_more_choices_than_slots_are_refused(own_service):
    service = own_service
    total = service.state.config.scheduler.max_waiting + 16
    service.state.slots.acquire(total - 2)

    reply = service.http.post(TEXT, json={"model": MODEL, "prompt": [70], "n": 3, "max_tokens": 1})

    assert_error(reply, 503)
    until(lambda: service.state.slots.taken == total - 2)  # slots are released after the answer


@pytest.mark.bench  # the test compares times
def test_a_thousand_clients_are_refused_faster_than_anybody_can_be_answered(full):
    """The service refuses a request before it has read the body, so a refusal is faster than the
    fastest answer.
    """
    port = full.http.base_url.port

    def ratio() -> float:
        refused = ask_all(port, NUM_CLIENTS, 503, post())
        answered = ask_all(port, NUM_CLIENTS, 200, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        return percentile(refused, 0.99) / percentile(answered, 0.99)

    assert ratio() < 0.7


def test_a_refused_client_may_ask_again_on_its_connection(full):
    with connect(full) as client:
        for _ in range(3):
            client.sendall(post("X-Request-Id: mine"))
            refused = read_reply(client)
            assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"x-request-id: mine\r\n" in refused

        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_reply(client).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_that_comes_after_its_refusal_is_passed_over(full):
    head, _, body = post().partition(b"\r\n\r\n")
    with connect(full) as client:
        client.sendall(head + b"\r\n\r\n" + body[:5])
        assert b" 503 " in read_reply(client)

        client.sendall(body[5:] + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in read_reply(client)


@pytest.mark.parametrize("header", ["Expect: 100-continue", "Connection: close"])
def test_a_refusal_on_a_half_closed_connection_says_connection_close(full, header):
    with connect(full) as client:
        client.sendall(post(header))
        client.shutdown(socket.SHUT_WR)

        refused = b"".join(iter(lambda: client.recv(65536), b""))

    assert refused.count(b"HTTP/1.1 503") == refused.count(b"HTTP/1.1") == 1
    assert b"connection: close\r\n" in refused


def test_refusals_keep_their_place_among_the_answers_of_a_connection(full):
    version = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(full) as client:
        client.sendall(version + post() + version)

        found = b""
        while found.count(b"HTTP/1.1") < 3:
            found += client.recv(65536)

    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"503", b"200"]


def post(*headers: str) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HI}).encode()
    lines = (
        f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json",
        f"Content-Length: {len(body)}", *headers, "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + body


def connect(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.http.base_url.port), timeout=30)


def read_reply(client: socket.socket) -> bytes:
    """Read one response that has a Content-Length."""
    found = b""
    while b"\r\n\r\n" not in found:
        piece = client.recv(65536)
        assert piece, found
        found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
    while len(body) < length:
        body += client.recv(65536)
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
