"""Several ingresses of one service serve the same engine, each at its own port."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.processes.serve_client import make_request
from benchmarks.processes.serve_servers import Server, plain
from dist_aclgraph.actors.host import processes
from dist_aclgraph.cli.opened import open_service
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.shipped import shipped
from tests.actors.leftovers import wait_until

TOKEN_ID = 65
BODY = b'{"model": "tiny-qwen3", "prompt": "Count.", "max_tokens": 4, "stream": true}'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = make_config({"model": str(shipped("models/tiny-qwen3"))})
    with plain(config, tmp_path, num_ingresses=2) as server:
        yield server


def open_stream(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(60.0)
    connection.sendall(make_request("/v1/completions", BODY))
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def replica_of(port: int) -> str:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found: str
    (found,) = set(re.findall(r'replica="([^"]*)"', text))
    return found


def test_an_ingress_that_dies_is_replaced_and_its_streams_and_the_others_go_on(
    server: Server,
) -> None:
    assert len({replica_of(port) for port in server.ports}) == 2
    streams = [open_stream(port) for port in server.ports]
    server.source.wait_for(2)
    server.source.step(TOKEN_ID, is_last=False)

    os.kill(server.ingresses[0], signal.SIGKILL)
    wait_until(lambda: not processes.is_running(server.ingresses[0]), "the ingress lives")
    server.source.wait_for(3)  # the new ingress submits the request of the lost stream again
    server.source.step(TOKEN_ID, is_last=True)

    for stream in streams:
        assert b"[DONE]" in read_all(stream)
    assert processes.is_running(server.ingresses[1])


def test_a_service_of_one_process_has_one_ingress() -> None:
    keys = {"serve": {"replicas": 2}, "recovery": {"keep_answers": False}}
    config = make_config({"model": str(shipped("models/tiny-qwen3")), **keys})

    with pytest.raises(ConfigError, match="keep_answers=false"), open_service(config):
        pass


def test_each_ingress_has_a_socket_file_of_its_own(tmp_path: Path) -> None:
    keys = {"serve": {"replicas": 3, "uds": str(tmp_path / "api")}}
    config = make_config({"model": str(shipped("models/tiny-qwen3")), **keys})

    with open_service(config) as opened:
        found = [http.getsockname() for http in opened.http]
        assert found == [str(tmp_path / name) for name in ("api", "api.1", "api.2")]

    assert not list(tmp_path.iterdir())
