"""The kernel's counters contain the numbers of bytes that a connection has sent and read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.serve.http.server import listen
from dist_aclgraph.serve.resume.counters import read_counters


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


@given(st.lists(st.tuples(st.integers(1, 40_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_a_connection_has_taken(
    writes: list[tuple[int, bool]],
) -> None:
    with connected() as (client, server):
        server.setblocking(False)
        begun, taken = read_counters(server.fileno()).num_sent, 0
        for count, reads in writes:
            try:
                taken += server.send(bytes(count))
            except BlockingIOError:
                reads = True
            if reads:
                client.recv(30_000)
            assert read_counters(server.fileno()).num_sent - begun == taken


@given(st.lists(st.tuples(st.integers(1, 9_000), st.booleans()), max_size=12))
def test_the_kernel_says_how_many_bytes_of_a_connection_have_been_read(
    sent: list[tuple[int, bool]],
) -> None:
    with connected() as (client, server):
        begun, num_read = read_counters(server.fileno()).num_read, 0
        for count, reads in sent:
            client.sendall(bytes(count))
            if reads:
                num_read += len(server.recv(4_000))
            assert read_counters(server.fileno()).num_read - begun == num_read


def test_urgent_data_is_data_like_all_other() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        server.settimeout(10)
        client.sendall(b"abcde")
        client.send(b"fgh", socket.MSG_OOB)
        client.sendall(b"ijkl")
        data = b""
        while len(data) < 12:
            data += server.recv(2)
            assert read_counters(server.fileno()).num_read == len(data)
    assert data == b"abcdefghijkl"
