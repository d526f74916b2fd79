"""A client that sends or reads too slowly, or sends too much, is disconnected."""

from __future__ import annotations

import json
import random
import socket
import struct
from contextlib import ExitStack, suppress

import pytest

from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.api_keys import ApiKey, ApiKeys
from tests.serve.conftest import serving, until
from tests.serve.openai.test_errors import CHAT, HI, MODEL

LIMITS = {
    "serve.header_s": 0.3,
    "serve.body_s": 0.5,
    "serve.keep_alive_s": 0.4,
    "serve.stall_s": 0.5,
    "serve.max_header_bytes": 4096,
    "serve.max_connections": 20,
    "serve.max_bodies_mib": 4,
}
WAIT_S = 180.0


@pytest.fixture(scope="module")
def limited():
    with serving(**LIMITS) as service:
        yield service


def connect(service, receive_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(WAIT_S)
    client.connect(("127.0.0.1", service.http.base_url.port))
    return client


def head(path: str, length: int, *more: str) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", "")
    return "\r\n".join(lines).encode()


def rest(client: socket.socket) -> bytes:
    """Return all bytes that arrive until the server closes or resets the connection."""
    found = b""
    try:
        while piece := client.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_a_connection_without_a_request_is_closed_after_its_time(limited) -> None:
    """The time limit applies only between the requests of a connection."""
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(limited) as client:
        client.sendall(request + request)
        answers = rest(client)

    assert answers.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"G"])
def test_headers_that_do_not_come_end_the_connection(limited, sent):
    with connect(limited) as client:
        client.sendall(sent)

        assert rest(client) == b""


def test_a_second_request_on_a_connection_has_the_same_time(limited):
    with connect(limited) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\n")

        assert rest(client).count(b"HTTP/1.1 200") == 1


EARLY = "POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"


@pytest.mark.parametrize(
    ("request_head", "status", "behind"),
    [
        ("GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"\r\n"),
        ("GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"\r"),
        (head("/tokenize", 1).decode() + "{", 400, b"\r\n"),
        (EARLY, 404, b"{"),  # the rest of the body of a request that was already answered
    ],
)
def test_bytes_that_begin_no_request_end_a_used_connection(limited, request_head, status, behind):
    with connect(limited) as client:
        client.sendall(request_head.encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 %d" % status)
        client.sendall(behind)

        assert rest(client) == b""


def test_a_client_without_a_key_does_not_hold_a_connection_either():
    with (
        serving(Access(ApiKeys(fixed=(ApiKey.of("another"),))), **LIMITS) as service,
        connect(service) as client,
    ):
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401")
        client.sendall(b"\r\n")

        assert rest(client) == b""


def test_empty_lines_one_by_one_do_not_hold_a_used_connection(limited):
    with connect(limited) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536)

        def is_closed() -> bool:
            try:
                client.sendall(b"\r\n")
            except OSError:
                return True
            return False

        until(is_closed)


def test_empty_lines_before_a_request_and_while_it_is_answered_are_no_fault(limited):
    with connect(limited) as client:
        for _ in range(2):
            client.sendall(b"\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_large_headers_are_refused(limited):
    with connect(limited) as client:
        client.sendall(head(CHAT, 0, "X-Large: " + "x" * 5000))

        assert b"HTTP/1.1 431" in rest(client)


def test_many_small_headers_at_once_are_not_large(limited):
    request = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    begun, ended = request[:20], request[20:]
    with connect(limited) as client:
        client.sendall(begun)
        until(lambda: limited.http.get("/version").status_code == 200)

        replies = b""
        for sent, count in ((ended + request * 200 + begun, 201), (ended, 202)):
            client.sendall(sent)
            while replies.count(b"HTTP/1.1 200") < count:
                more = client.recv(65536)
                assert more, "the connection ended"
                replies += more


def test_headers_without_an_end_are_cut_off(limited):
    with connect(limited) as client, pytest.raises(OSError):
        for _ in range(100_000):
            client.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")


JSON = "Content-Type: application/json"
CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        pytest.param(b"0\r\nX: ", b"x", id="one trailer"),
        pytest.param(b"0\r\n", b"X: x\r\n", id="many trailers"),
        pytest.param(b"1;x=", b"x", id="an extension of a chunk"),
    ],
)
def test_trailers_and_extensions_of_chunks_without_an_end_are_cut_off(service, begun, more):
    piece = more * (60_000 // len(more))
    with connect(service) as client:
        client.sendall(CHUNKED + b"1\r\n{\r\n" + begun)

        with pytest.raises(OSError):  # the service resets the connection after a few MB
            for _ in range(500):
                client.sendall(piece)


def test_a_body_in_many_small_chunks_is_none_of_these(limited):
    body = json.dumps({"model": MODEL, "prompt": "a" * 4000}).encode()
    chunks = [b"1\r\n%c\r\n" % byte for byte in body]
    with connect(limited) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(CHUNKED)
        for i in range(0, len(chunks), 100):
            client.sendall(b"".join(chunks[i : i + 100]))
        client.sendall(b"0\r\nX-Checksum: 1\r\n\r\n")

        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_is_a_408(limited):
    with connect(limited) as client:
        client.sendall(head(CHAT, 100) + b'{"model"')

        reply = rest(client)

    assert b"HTTP/1.1 408" in reply
    assert b"did not arrive within 0.5 s" in reply


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size)


def assert_full(reply: bytes) -> None:
    assert reply.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in reply.lower()
    assert b"the bodies of requests in progress take more than 4 MiB; try again later" in reply


def test_bodies_have_a_limit_all_together():
    asked = json.dumps({"model": MODEL, "messages": HI}).encode()
    with serving(**{"serve.max_bodies_mib": 4}) as service, ExitStack() as stack:
        service.engine.step_s = 1.0
        large, small, answered, waiting = (stack.enter_context(connect(service)) for _ in range(4))
        bodies = service.state.bodies
        large.sendall(CHUNKED + chunk(2 << 20))  # stored twice, so this fills the budget
        until(lambda: bodies.num_bytes == 4 << 20)

        small.sendall(CHUNKED + chunk(1000))
        assert_full(small.recv(65536))
        until(lambda: bodies.num_bytes == 4 << 20)

        # A body counts until its request is answered. While the budget is used up, the service does
        # not send "100 Continue". Clients that wait for this response send no body.
        answered.sendall(head(CHAT, len(asked), JSON) + asked)
        until(lambda: service.engine.num_running == 1)
        waiting.sendall(head("/tokenize", 100, "Expect: 100-continue", JSON))
        assert_full(waiting.recv(65536))
        assert service.http.get("/version").status_code == 200
        answered.close()
        until(lambda: bodies.num_bytes == 4 << 20)

        large.sendall(b"0\r\n\r\n")
        assert large.recv(65536).startswith(b"HTTP/1.1 400")
        until(lambda: bodies.num_bytes == 0)


@pytest.mark.parametrize("seed", range(3))
def test_of_bodies_that_end_anyhow_nothing_stays_counted(limited, seed):
    """At random, a body is complete, too large, too slow or refused, or its connection ends."""
    random_ = random.Random(seed)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(limited)) for _ in range(16)]
        for client in clients:
            request = CHUNKED + chunk(random_.randrange(1, 3 << 20)) + b"0\r\n\r\n"
            num_sent = random_.choice([len(request), random_.randrange(len(request))])
            with suppress(OSError):  # the service may refuse a body before the body's end
                client.sendall(request[:num_sent])
        for client in clients:
            if random_.random() < 0.4:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if random_.random() < 0.8:
                client.close()

        until(lambda: limited.state.bodies.num_bytes == 0, WAIT_S)


def test_a_body_that_nobody_reads_ends_the_connection_too(limited):
    with connect(limited) as client:
        client.sendall(head("/nowhere", 100) + b"{")

        assert b"HTTP/1.1 404" in rest(client)


def test_a_client_that_does_not_read_is_cut_off_and_its_request_freed(limited):
    limited.engine.reply = lambda submit: [70] * submit.max_tokens
    body = {"model": MODEL, "messages": HI, "stream": True, "logprobs": True, "top_logprobs": 20}
    sent = json.dumps(body).encode()

    with connect(limited, receive_bytes=4096) as client:
        client.sendall(head(CHAT, len(sent)) + sent)
        until(lambda: limited.engine.num_running == 1, WAIT_S)
        until(lambda: limited.engine.num_running == 0, WAIT_S)

        assert len(limited.engine.aborted) == 1
        assert b"[DONE]" not in rest(client)
    limited.engine.aborted.clear()


def test_a_client_that_reads_slowly_but_steadily_gets_everything(limited):
    limited.engine.reply = lambda submit: [70] * submit.max_tokens
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 50}
    sent = json.dumps(body).encode()

    with connect(limited) as client:
        client.sendall(head(CHAT, len(sent), "Connection: close") + sent)
        found = b"".join(iter(lambda: client.recv(64), b""))

    assert b"[DONE]" in found


def test_more_connections_than_allowed_are_told_to_come_back():
    with (
        serving(**{"serve.max_connections": 3, "serve.header_s": WAIT_S}) as service,
        ExitStack() as clients,
    ):
        service.http.close()
        *_, last = (clients.enter_context(connect(service)) for _ in range(4))
        last.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")

        reply = rest(last)
    assert b"HTTP/1.1 503" in reply
    assert b"retry-after: 1" in reply.lower()
