"""Transfers between devices of two processes (adxl::AdxlEngine): bytes, refusals, timeouts, faults.

The rules are from CANN's documentation of these calls. Two programs in C++ make the calls.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.emulator.adxl_engines import (
    ALREADY,
    DEVICE,
    EXHAUSTED,
    FAILED,
    HOST,
    INVALID,
    LIMIT_S,
    LONG_MS,
    MIB,
    NO_POOL,
    NOT_CONNECTED,
    OK,
    READ,
    TIMEOUT,
    UNSUPPORTED,
    WRITE,
    Engine,
    build_program,
    wait_until,
)
from tests.ports import free_port

WAITING, COMPLETED, BROKEN = 0, 1, 3  # of requests


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build_program(tmp_path_factory.mktemp("adxl"))


@pytest.fixture
def start(program) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts the process of an engine. The function's arguments are settings
    of the emulator; arguments in capitals are environment variables.
    """
    engines: list[Engine] = []
    devices = itertools.count()

    def begun(device: int | None = None, **settings) -> Engine:
        environment = {k: v for k, v in settings.items() if k.isupper()}
        settings = {k: v for k, v in settings.items() if not k.isupper()}
        number = next(devices) if device is None else device
        engines.append(Engine(program, settings, environment, number))
        return engines[-1]

    yield begun
    for engine in engines:
        engine.process.kill()
        engine.process.communicate()


@pytest.fixture
def pair(start) -> tuple[Engine, Engine]:
    return start().begin(), start().begin()


def test_exactly_the_spans_move_in_both_directions(pair):
    a, b = pair
    mine, yours = a.memory(4 * MIB, 1), b.memory(4 * MIB, 2)
    b.wants("fill", yours + 100, 50, 3)
    a.link(b)

    read = mine + 1000, yours + 90, 70, mine + 3 * MIB, yours, 3
    assert a.move(b, READ, *read) == OK
    assert a.bytes_at(mine, 2000) == "1*1000 2*10 3*50 2*10 1*930"
    assert a.bytes_at(mine + 3 * MIB - 1, 5) == "1*1 2*3 1*1"

    assert a.move(b, WRITE, mine + 5, yours + 2 * MIB, 2 * MIB) == OK  # more than one piece
    written = f"2*1 1*995 2*10 3*50 2*10 1*{2 * MIB - 1065}"
    assert b.bytes_at(yours + 2 * MIB - 1, 2 * MIB + 1) == written


@pytest.mark.parametrize("place", ["mine", "yours"])
def test_memory_outside_registered_ranges_is_refused_before_a_byte_moves(pair, place):
    a, b = pair
    mine, yours = a.memory(4 * MIB, 1), b.memory(4 * MIB, 2)
    engine = a if place == "mine" else b
    (other,) = engine.wants("malloc", 4 * MIB)
    a.link(b)
    late = engine.memory(4 * MIB, 3)  # too late for this link

    for address, length in (
        (other, 8),
        (late, 8),
        (0, 8),
        (mine if engine is a else yours, 5 * MIB),
    ):
        spans = (address, yours, length) if engine is a else (mine, address, length)
        assert a.move(b, READ, mine, yours, 8, *spans) == INVALID
        assert "register" in a.text or "no address" in a.text
    assert a.bytes_at(mine, 64) == "1*64"
    assert a.move(b, READ, mine, yours, 8) == OK  # the refusals above did not break the link


def test_memory_that_is_not_of_the_device_cannot_be_registered(start):
    a = start().begin()
    (address,) = a.wants("malloc", 4 * MIB)
    (pinned,) = a.wants("malloc_host", MIB)

    assert a.status("register", address, 5 * MIB, DEVICE) == INVALID
    assert a.status("register", pinned, MIB, DEVICE) == INVALID
    assert a.status("register", address, MIB, HOST) == INVALID
    assert a.status("register", 4096, MIB, HOST) == INVALID
    assert a.status("register", 0, MIB, DEVICE) == INVALID
    a.wants("device", 2)
    (elsewhere,) = a.wants("malloc", 4 * MIB)
    a.wants("device", 0)
    assert a.status("register", elsewhere, MIB, DEVICE) == INVALID
    assert "no memory of device 0" in a.text


@pytest.mark.parametrize("place", ["mine", "yours"])
def test_hccs_demands_that_device_memory_begins_at_2_mib(start, place):
    def linked(**settings) -> int:
        of_peer = {} if "HCCL_INTRA_ROCE_ENABLE" in settings else settings  # one end suffices
        a, b = start(device=0, **settings).begin(), start(device=1, **of_peer).begin()
        engine = a if place == "mine" else b
        (address,) = engine.wants("malloc", 4 * MIB)
        engine.wants("register", address + 4096, MIB, DEVICE)
        status = a.status("connect", b.name, LONG_MS)
        assert status == OK or "2 MiB" in a.text
        return status

    assert linked() == FAILED
    assert linked(strict=0) == OK
    assert linked(admit="multiple+of+2+MiB") == OK
    assert linked(HCCL_INTRA_ROCE_ENABLE="1") == OK


def test_hosts_are_linked_without_hccs(start):
    a, b = start(host="a").begin(), start(host="b").begin()
    mine, yours = a.memory(MIB, 1, HOST), b.memory(MIB, 2, HOST)
    a.link(b)

    assert a.move(b, READ, mine, yours, 10) == OK
    assert a.bytes_at(mine, 20) == "2*10 1*10"


def test_hccs_moves_no_bytes_from_host_to_host(pair):
    a, b = pair
    mine, yours = a.memory(MIB, 1, HOST), b.memory(MIB, 2, HOST)
    device = a.memory(2 * MIB, 4)
    a.link(b)

    assert a.move(b, READ, mine, yours, 10) == INVALID and "HCCS" in a.text
    assert a.move(b, READ, device, yours, 10) == OK
    assert a.bytes_at(device, 20) == "2*10 4*10"


def test_a_device_is_not_linked_to_itself(start):
    a, b, other = start(0).begin(), start(0).begin(), start(0, host="b").begin()

    assert a.status("connect", b.name, LONG_MS) == INVALID and "same device" in a.text
    assert a.status("connect", a.name, LONG_MS) == INVALID
    assert a.status("connect", other.name, LONG_MS) == OK  # device 0 of another host
    visible = start(0, ASCEND_RT_VISIBLE_DEVICES="3").begin()
    assert a.status("connect", visible.name, LONG_MS) == OK


def test_links_are_made_once_and_have_a_limit_of_time(pair, start):
    a, b = pair
    absent = f"127.0.0.1:{free_port()}"

    assert a.status("connect", absent, LONG_MS) == FAILED
    assert a.status("connect", b.name, 0) == INVALID
    assert a.status("connect", "somewhere:80") == INVALID
    assert a.status("disconnect", b.name) == NOT_CONNECTED
    assert a.move(b, READ, 1, 1, 1) == NOT_CONNECTED
    a.link(b)
    assert a.status("connect", b.name, LONG_MS) == ALREADY
    assert a.move(b, READ, 1, 1, 1, timeout_ms=0) == INVALID
    a.unlink(b)
    a.link(b)

    c = start().begin()
    c.stop()
    assert a.status("connect", c.name, 200) == TIMEOUT


def test_a_stopped_process_does_not_stop_transfers(pair):
    a, b = pair
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)
    b.stop()

    assert a.move(b, READ, mine, yours, 10) == OK
    assert a.bytes_at(mine, 20) == "2*10 1*10"
    assert a.status("disconnect", b.name, 200) == TIMEOUT  # the peer does not confirm
    assert a.move(b, READ, mine, yours, 10) == NOT_CONNECTED


def test_a_transfer_after_its_timeout_goes_on_until_the_link_is_closed(start):
    stalled = {"fault_op": "adxl_transfer", "fault_kind": "stall"}
    a, b = start(**stalled, fault_call=2, stall_s=3).begin(), start().begin()
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)

    spans = mine, yours, 10, mine + 20, yours, 10
    assert a.move(b, READ, *spans, timeout_ms=100) == TIMEOUT
    assert a.move(b, READ, *spans) == FAILED and "failed before" in a.text
    wait_until(lambda: a.bytes_at(mine, 40) == "2*10 1*10 2*10 1*10")  # written after the timeout

    c = start(**stalled, stall_s=3600).begin()
    mine = c.memory(2 * MIB, 1)
    c.link(b)
    assert c.move(b, READ, mine, yours, 10, timeout_ms=100) == TIMEOUT
    c.unlink(b)  # returns during the stall, and cancels the transfer
    c.link(b)
    assert c.bytes_at(mine, 10) == "1*10"
    assert c.move(b, READ, mine + 100, yours, 10) == OK


def test_a_fault_of_the_link_fails_it_until_it_is_made_again(start):
    a = start(fault_op="adxl_transfer", fault_call=3, fault_kind="link").begin()
    b = start().begin()
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)

    spans = [word for i in range(4) for word in (mine + 10 * i, yours, 10)]
    assert a.move(b, READ, *spans) == FAILED and "link error" in a.text
    assert a.bytes_at(mine, 40) == "2*20 1*20"
    assert a.move(b, READ, *spans) == FAILED
    a.unlink(b)
    a.link(b)
    assert a.move(b, READ, *spans) == OK


def test_a_link_may_fail_to_be_made(start):
    a, b = start(fault_op="adxl_connect").begin(), start().begin()

    assert a.status("connect", b.name, LONG_MS) == FAILED and "injected fault" in a.text
    assert a.status("connect", b.name, LONG_MS) == OK


def test_a_killed_peer_fails_transfers(pair):
    a, b = pair
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)
    b.kill()

    assert a.move(b, READ, mine, yours, 10) == FAILED and "link error" in a.text
    assert a.bytes_at(mine, 10) == "1*10"
    a.unlink(b)
    assert a.status("connect", b.name, LONG_MS) == FAILED


def test_freed_memory_fails_transfers(pair):
    a, b = pair
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)
    b.wants("free", yours)

    assert a.move(b, READ, mine, yours, 10) == FAILED and "link error" in a.text


def test_a_server_that_ends_first_fails_its_clients(pair):
    a, b = pair
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)
    b.wants("finalize")

    assert a.move(b, READ, mine, yours, 10) == FAILED
    assert b.status("register", yours, MIB, DEVICE) == FAILED and "Initialize" in b.text


def test_requests_are_queried_until_they_end(start):
    a = start(fault_op="adxl_transfer", fault_kind="stall", stall_s=3600, fault_call=2).begin()
    b = start().begin()
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)
    a.link(b)

    (request,) = a.wants("start", b.name, READ, mine, yours, 10)
    found = []
    wait_until(lambda: found.append(a.answer("status", request)) or found[-1] != [OK, WAITING])
    assert found[-1] == [OK, COMPLETED]
    assert a.answer("status", request) == [INVALID, BROKEN]
    assert a.bytes_at(mine, 20) == "2*10 1*10"

    (stalled,) = a.wants("start", b.name, READ, mine, yours, 20)
    (behind,) = a.wants("start", b.name, READ, mine, yours, 20)
    assert a.answer("status", stalled) == [OK, WAITING]
    a.unlink(b)
    for request in (stalled, behind):
        assert a.answer("status", request) == [NOT_CONNECTED, BROKEN]
        assert a.answer("status", request) == [INVALID, BROKEN]
    assert a.status("status", 0) == FAILED
    assert a.bytes_at(mine, 20) == "2*10 1*10"


def test_a_link_takes_streams_at_both_ends(start):
    a, b = start(streams=8).begin(), start(streams=8).begin()
    clients = [a, start(streams=8).begin(), start(streams=8).begin()]
    assert a.wants("streams") == b.wants("streams") == [8]

    a.link(b)
    assert (a.wants("streams"), b.wants("streams")) == ([8 - 2 - 1], [8 - 2])
    a.unlink(b)
    assert a.wants("streams") == b.wants("streams") == [8]
    for client in clients:
        client.link(b)
    assert b.wants("streams") == [2]
    clients[0].unlink(b)

    poor = start(device=3, streams=2).begin()
    assert poor.status("connect", b.name, LONG_MS) == EXHAUSTED
    poor = start(device=3, streams=1).begin()
    assert poor.status("connect", b.name, LONG_MS) == FAILED and "communication domain" in poor.text
    assert a.status("connect", poor.name, LONG_MS) == FAILED  # the server has too few


def test_memory_of_a_link_stays_registered(pair):
    a, b = pair
    (mine,), (yours,) = a.wants("malloc", 2 * MIB), b.wants("malloc", 2 * MIB)
    (first,) = a.wants("register", mine, MIB, DEVICE)
    (second,) = b.wants("register", yours, MIB, DEVICE)
    a.link(b)

    assert a.status("deregister", first) == FAILED and "disconnect" in a.text
    assert b.status("deregister", second) == FAILED
    a.unlink(b)
    a.wants("deregister", first)
    b.wants("deregister", second)
    a.link(b)
    assert a.move(b, READ, mine, yours, 10) == INVALID


def test_options_and_names_are_checked(start):
    a = start()
    a.name = "127.0.0.1"  # a client only

    assert a.status("init", a.name) == UNSUPPORTED and "0:0" in a.text
    assert a.status("init", a.name, "adxl.BufferPool=4:8") == UNSUPPORTED
    assert a.status("init", a.name, NO_POOL, "Speed=1") == INVALID
    assert a.status("init", a.name, NO_POOL, "AutoConnect=2") == INVALID
    for name in ("0.0.0.0:80", "[::]:80", "host:80", "127.0.0.1:x", "127.0.0.1:70000"):
        assert a.status("init", name, NO_POOL) == INVALID
    assert a.status("malloc", 8) == OK and a.status("register", 1, 1, DEVICE) == FAILED
    a.begin()
    assert a.answer("capability", 0) == [OK, 1] and a.answer("capability", 7) == [OK, 0]
    assert a.status("capability", -1) == INVALID
    assert a.status("notify", "127.0.0.1:1") == UNSUPPORTED


def test_calls_need_the_context_of_the_start(start):
    a, b = start().begin(), start().begin()
    a.wants("device", 2)

    assert a.status("connect", b.name, LONG_MS) == INVALID and "context" in a.text
    a.wants("device", 0)
    a.link(b)


def test_a_transfer_links_engines_by_itself(start):
    a = start(fault_op="adxl_transfer", fault_call=2).begin("AutoConnect=1")
    b = start().begin()
    mine, yours = a.memory(2 * MIB, 1), b.memory(2 * MIB, 2)

    assert a.move(b, READ, mine, yours, 10) == OK
    assert a.move(b, READ, mine, yours, 10) == FAILED  # this also ends the link
    assert a.move(b, READ, mine, yours, 10) == OK
    b.kill()
    assert a.move(b, READ, mine, yours, 10) == FAILED
    assert a.move(b, READ, mine, yours, 10) == NOT_CONNECTED


def test_strangers_get_no_answer_and_delay_no_client(pair):
    a, b = pair
    port = int(b.name.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)) as rude,
    ):
        rude.sendall(b"x" * 4096)
        a.link(b)
        rude.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert rude.recv(1) == b""
