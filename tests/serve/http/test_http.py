"""The server follows RFC 9112 for clients of any HTTP version, and serves Unix sockets."""

from __future__ import annotations

import socket

import httpx
import pytest

from dist_aclgraph.config import ServeConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.access import read_access
from dist_aclgraph.serve.http.server import HttpServer, listen_at
from dist_aclgraph.serve.resume.holder import HolderLink
from tests.serve.openai.test_errors import CHAT, HI, MODEL

STREAM = b'{"model":"tiny-qwen3","messages":[{"role":"user","content":"x"}],"stream":true}'


def ask(service, request: bytes) -> bytes:
    """Send ``request``; return everything that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", service.http.base_url.port), timeout=30) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_stream_to_a_client_of_http_1_0_is_not_chunked(service):
    service.answer("two words")
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Length: {len(STREAM)}\r\n\r\n".encode()

    headers, _, body = ask(service, head + STREAM).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    frames = body.split(b"\n\n")
    assert all(frame.startswith(b"data: ") for frame in frames[:-1])
    assert frames[-2:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_a_request_without_one_host_is_refused(service, hosts):
    answer = ask(service, b"GET /health HTTP/1.1\r\n" + hosts + b"\r\n")

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"exactly one Host" in answer


def test_a_client_of_http_1_0_needs_no_host(service):
    assert ask(service, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_service_at_a_unix_socket(service, tmp_path):
    config = ServeConfig(uds=str(tmp_path / "api"))
    service.answer("a")
    listen_at(config).close()  # leaves the socket's file, like a service that was killed
    listener = listen_at(config)
    server = HttpServer(service.state.config.serve, listener, link=HolderLink())
    server.start(make_api(service.state, read_access(config, checks_host=True)))
    client = httpx.Client(transport=httpx.HTTPTransport(uds=config.uds), base_url="http://any.name")

    try:
        reply = client.post(CHAT, json={"model": MODEL, "messages": HI})
        streamed = client.post(CHAT, json={"model": MODEL, "messages": HI, "stream": True})
        with pytest.raises(ConfigError, match=r"serve\.uds is .*/api: it cannot be bound"):
            listen_at(config)
    finally:
        server.stop()

    assert reply.json()["choices"][0]["message"]["content"] == "a"
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_an_address_may_be_in_brackets():
    assert ServeConfig(host="[::1]").host == "::1"


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("size", [1, 200, 1000])
def test_requests_that_offer_another_protocol_are_answered_in_http_1_1(service, size):
    service.answer("two words")
    body = STREAM.replace(b"true", b"false")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    chunked = head.partition(b"Content")[0] + b"Transfer-Encoding: chunked\r\n"
    last = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: x\r\nConnection: upgrade, close\r\n"
    )
    data = head + H2C + b"\r\n" + body + chunked + H2C + b"\r\n"
    data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + last + b"\r\n"

    with socket.create_connection(("127.0.0.1", service.http.base_url.port)) as client:
        for start in range(0, len(data), size):
            client.sendall(data[start : start + size])
        answer = b"".join(iter(lambda: client.recv(65536), b""))

    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"two words") == 2
    assert b"connection: close" in answer.lower()


def test_an_address_without_a_path_is_the_root(service):
    head = b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    assert ask(service, head).startswith(b"HTTP/1.1 200 ")
