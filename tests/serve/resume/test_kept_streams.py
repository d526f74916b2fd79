"""If the process that sends answers is killed, answers continue over the same connections.

A kill does not change the bytes of any body.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dist_aclgraph.arrays.ints import INT_BYTES
from dist_aclgraph.serve.resume.record import MAX_LOSSES
from tests import laws
from tests.serve.conftest import until
from tests.serve.kept_answers import (
    HEADERS,
    KINDS,
    LONG,
    MANY_BYTES,
    WAIT_S,
    Answer,
    Service,
    num_descriptors_of,
    post,
    serving,
    status_on,
)
from tests.slow import slow


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def test_every_answer_goes_on_byte_by_byte_however_often_the_ingress_is_killed(
    service: Service,
) -> None:
    requests = list(KINDS.values())
    wanted = service.ask_all(requests)
    assert [answer.error for answer in wanted] == [""] * len(requests)
    assert all(answer.bodies for answer in wanted)
    rng = random.Random(7)

    for _ in range(laws.count(10)):
        counts = [rng.randrange(50, 600) for _ in range(MAX_LOSSES - 1)]
        with service.killed_after(*counts):
            answers = service.ask_all(requests)
        for kind, answer, plain in zip(KINDS, answers, wanted, strict=True):
            assert (kind, answer.error) == (kind, "")
            assert (kind, answer.bodies) == (kind, plain.bodies)


def test_nothing_is_kept_of_what_has_ended(service: Service) -> None:
    until(lambda: service.engine.num_running == 0, WAIT_S)
    before = service.num_descriptors_at_rest()

    service.ask_all(list(KINDS.values()), count=1)
    with service.connect() as client:  # this client disconnects before its answer is complete
        client.sendall(KINDS["chat"])
        service.wait_until_read(client)  # at this moment, the supervisor holds the connection

    until(lambda: service.num_descriptors <= before, WAIT_S)


@pytest.mark.slow
def test_a_connection_is_used_again_behind_an_answer_that_went_on(service: Service) -> None:
    [plain] = service.ask_all([KINDS["chat"]], count=2)

    with service.killed_after(50):
        [answer] = service.ask_all([KINDS["chat"]], count=2)

    assert (answer.error, answer.bodies) == ("", plain.bodies)


@pytest.mark.slow
def test_a_reader_that_stops_gets_all_of_it_later(service: Service) -> None:
    service.engine.step_s = 0.001
    plain = service.ask(LONG)
    answer = Answer()
    with service.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(LONG)
        service.wait_for_tokens(500)

        service.kill()
        with client.makefile("rb") as stream:
            answer.read(stream)

    service.engine.step_s = 0.01
    assert answer.bodies == plain.bodies


@pytest.mark.slow
def test_a_request_right_behind_a_large_answer_goes_on_like_all_others(service: Service) -> None:
    service.engine.step_s = 0.001
    plain = service.ask(LONG), service.ask(KINDS["chat"])
    answer = Answer()
    with service.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(LONG)
        until(lambda: service.engine.num_running == 1, WAIT_S)
        until(lambda: service.engine.num_running == 0, WAIT_S)
        with client.makefile("rb") as stream:
            answer.read(stream)
            service.engine.step_s = 0.01
            client.sendall(KINDS["chat"])
            until(lambda: service.engine.num_running == 1, WAIT_S)

            service.kill()

            answer.read(stream)
    assert answer.bodies == plain[0].bodies + plain[1].bodies


@pytest.mark.parametrize("num_before", [20, slow(200)])
def test_of_two_requests_at_once_on_one_connection_none_waits_for_ever(
    service: Service, num_before: int
) -> None:
    """If the process dies during the first answer, both answers arrive.

    If the process dies during the second answer, the connection ends, because the second answer has
    no journal.
    """
    [plain] = service.ask_all([KINDS["chat"]])
    answer = Answer()
    with service.connect() as client, client.makefile("rb") as stream:
        client.sendall(KINDS["chat"])
        service.wait_for_tokens(1)
        client.sendall(KINDS["chat"])
        service.wait_until_read(client)
        with service.stopped_after(num_before):
            service.kill()

        answer.read(stream)
        assert answer.bodies == plain.bodies
        if num_before < 150:
            answer.read(stream)
            assert answer.bodies == 2 * plain.bodies
        else:
            with pytest.raises((AssertionError, OSError, ValueError)):
                answer.read(stream)


def stop(pid: int) -> None:
    """Stop a process with a signal; wait until all its threads have stopped."""

    def has_stopped() -> bool:
        found = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in found)

    os.kill(pid, signal.SIGSTOP)
    until(has_stopped, WAIT_S)


@pytest.mark.slow
def test_a_request_is_answered_wherever_the_ingress_dies_while_it_comes(service: Service) -> None:
    """The ingress dies in four situations: before it accepts the connection; before it reads the
    request; after it has read half of the request; on a connection with an earlier request.
    """
    request = KINDS["chat"]
    half = len(request) // 2
    plain = service.ask(request, count=2)
    pid = service.ingress()
    with ExitStack() as stack:
        begun, used, idle = (stack.enter_context(service.connect()) for _ in range(3))
        begun.sendall(request[:half])
        for client in (used, idle):
            client.sendall(request)
            stream = stack.enter_context(client.makefile("rb"))
            first = Answer()
            first.read(stream)
        service.wait_until_read(begun)

        stop(pid)
        used.sendall(request)
        fresh = stack.enter_context(service.connect())
        fresh.sendall(request)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        begun.sendall(request[half:])
        until(lambda: service.ingress(other_than=pid) > 0, WAIT_S)
        time.sleep(0.5)
        idle.sendall(request)

        for client in (begun, used, idle, fresh):
            answer = Answer()
            answer.read(stack.enter_context(client.makefile("rb")))
            assert answer.bodies == plain.bodies[:1]


@pytest.mark.parametrize("num_before", [slow(0), slow(60), slow(-10)])
def test_bytes_that_were_read_but_not_recorded_are_not_lost(
    tmp_path: Path, num_before: int
) -> None:
    """The ingress dies after it has read the first or the last part of a request.

    The first part of the request arrives directly after a response.
    """
    trap = tmp_path / "trap"
    request = KINDS["chat"]
    with serving(trap=trap) as service:
        service.engine.step_s = 0.002
        plain = service.ask(request)
        for _ in range(4):
            with service.connect() as client, client.makefile("rb") as stream:
                client.sendall(request)
                Answer().read(stream)
                client.sendall(request[:num_before])
                service.wait_until_read(client)
                trap.touch()
                client.sendall(request[num_before:])
                answer = Answer()

                answer.read(stream)

            assert not trap.exists()
            assert answer.bodies == plain.bodies


@pytest.mark.slow
def test_one_connection_outlives_any_number_of_processes(service: Service) -> None:
    plain = service.ask(KINDS["chat"])
    with service.connect() as client, client.makefile("rb") as stream:
        for _ in range(MAX_LOSSES + 1):
            client.sendall(KINDS["chat"])
            until(lambda: service.engine.num_running > 0, WAIT_S)
            service.kill()
            answer = Answer()
            answer.read(stream)
            assert answer.bodies == plain.bodies


def test_an_answer_that_goes_on_keeps_the_seed_that_was_drawn_for_it(service: Service) -> None:
    submitted = service.engine.submitted
    submitted.clear()
    for _ in range(2):
        asking = threading.Thread(target=service.ask, args=[KINDS["chat"]])
        asking.start()
        with service.stopped_after(5):
            service.kill()
        asking.join()

    seeds = [submit.sampling.seed for submit in submitted]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


@pytest.mark.slow
def test_bytes_that_begin_no_request_end_a_connection_that_went_on() -> None:
    with (
        serving(**{"serve.header_s": 1.0}) as service,
        service.connect() as client,
        client.makefile("rb") as stream,
    ):
        client.sendall(KINDS["chat"])
        until(lambda: service.engine.num_running > 0, WAIT_S)
        service.kill()
        Answer().read(stream)

        client.sendall(b"\r\n")

        with suppress(ConnectionResetError):
            assert stream.read() == b""


@pytest.mark.slow
def test_connections_are_looked_at_before_anything_can_be_served(tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("1024")
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(limit=limit) as service, ExitStack() as stack:
        idle, waiting = (stack.enter_context(service.connect()) for _ in range(2))
        for client in (idle, waiting):
            client.sendall(get)
            assert status_on(client) == 200
        limit.unlink()
        service.kill()
        waiting.sendall(KINDS["whole"])

        idle.sendall(get)
        assert status_on(idle) == 503
        limit.write_text("1024")
        answer = Answer()
        answer.read(stack.enter_context(waiting.makefile("rb")))


@pytest.mark.slow
def test_requests_wait_in_the_kernel_until_an_ingress_can_read_them(tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("1024")
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(limit=limit) as service, service.connect() as client:
        plain = service.ask(KINDS["chat"])
        client.sendall(KINDS["chat"])
        until(lambda: service.engine.num_running == 1, WAIT_S)
        limit.unlink()
        service.kill()

        num_sent = 0
        client.settimeout(2.0)
        with suppress(TimeoutError):
            while num_sent < MANY_BYTES:
                num_sent += client.send((get * 1000)[num_sent % len(get) :])

        assert num_sent < MANY_BYTES
        client.settimeout(WAIT_S)
        limit.write_text("1024")
        answer = Answer()
        with client.makefile("rb") as stream:
            answer.read(stream)
        assert answer.bodies == plain.bodies


def test_of_an_answer_that_is_not_written_down_nothing_comes_twice(service: Service) -> None:
    """A response that has begun without a journal cannot continue, so it ends with its process."""
    get = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    pid = service.ingress()
    with ExitStack() as stack:
        clients = [stack.enter_context(service.connect()) for _ in range(64)]
        for client in clients:
            client.sendall(get)
        os.kill(pid, signal.SIGKILL)
        until(lambda: service.ingress(other_than=pid) > 0, WAIT_S)
        for client in clients:
            stream = stack.enter_context(client.makefile("rb"))
            with suppress(OSError, AssertionError, ValueError):
                answer = Answer()
                answer.read(stream)
                assert answer.bodies[0].count(b"# HELP dist_aclgraph_engine_healthy") == 1


def test_a_connection_ends_at_once_though_somebody_else_holds_it(service: Service) -> None:
    plain = service.ask(KINDS["closes"])
    stop(service.process.pid)
    try:
        with service.connect() as client, client.makefile("rb") as stream:
            client.sendall(KINDS["closes"])
            answer = Answer()
            answer.read(stream)
            assert stream.read() == b""
    finally:
        os.kill(service.process.pid, signal.SIGCONT)
    assert answer.bodies == plain.bodies


def test_a_client_that_leaves_while_nobody_answers_is_not_kept(service: Service) -> None:
    until(lambda: service.engine.num_running == 0, WAIT_S)
    before = service.num_descriptors_at_rest()
    clients = [service.connect() for _ in range(5)]
    for client in clients:
        client.sendall(KINDS["chat"])
    until(lambda: service.num_descriptors >= before + 2 * len(clients), WAIT_S)

    pid = service.ingress()
    stop(pid)
    for client in clients:
        client.close()
    os.kill(pid, signal.SIGKILL)

    until(lambda: service.ingress(other_than=pid) > 0, WAIT_S)
    until(lambda: service.num_descriptors <= before, WAIT_S)


@pytest.mark.slow
def test_of_a_thousand_clients_that_vanish_nothing_is_held(service: Service) -> None:
    """Clients disconnect before or during their answers, most of them with a TCP reset."""
    until(lambda: service.engine.num_running == 0, WAIT_S)
    assert service.ask(KINDS["chat"]).error == ""  # libuv opens a file at the first connection
    pids = service.process.pid, service.ingress()
    before = [service.num_descriptors_at_rest(), num_descriptors_of(pids[1])]
    random_ = random.Random(5)
    for _ in range(10):
        clients = [service.connect() for _ in range(100)]
        for client in clients:
            client.sendall(LONG)
        service.wait_for_tokens(random_.randrange(1, 5000))
        for client in clients:
            if random_.random() < 0.8:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()

    until(lambda: service.engine.num_running == 0, WAIT_S)
    until(lambda: [num_descriptors_of(pid) for pid in pids] <= before, WAIT_S)
    assert service.ask(KINDS["chat"]).error == ""


def test_of_a_request_that_is_refused_in_the_end_nothing_comes_to_the_next(
    tmp_path: Path,
) -> None:
    """The next process refuses the request, because it allows a shorter context than the previous
    process.
    """
    limit = tmp_path / "limit"
    limit.write_text("1024")
    with (
        serving(limit=limit) as service,
        service.connect() as client,
        client.makefile("rb") as stream,
    ):
        client.sendall(post("completions", prompt="a b c", max_tokens=500))
        until(lambda: service.engine.metrics["generation_tokens"] > 80, WAIT_S)
        limit.write_text("100")

        service.kill()

        assert stream.readline().startswith(b"HTTP/1.1 400")
        while (line := stream.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length"):
                stream_length = int(line.split(b":")[1])
        stream.read(stream_length)
        client.sendall(post("completions", prompt="x", max_tokens=5))
        again = Answer()
        again.read(stream)
        assert json.loads(again.bodies[0])["usage"]["completion_tokens"] == 5
        assert len(service.engine.submitted[-1].prompt) == INT_BYTES


def test_an_answer_that_has_begun_is_not_refused_in_the_end(tmp_path: Path) -> None:
    limit = tmp_path / "limit"
    limit.write_text("1024")
    with serving(limit=limit) as service, service.connect() as client:
        client.sendall(post("completions", prompt="a b c", max_tokens=500, stream=True))
        until(lambda: service.engine.metrics["generation_tokens"] > 80, WAIT_S)
        answer = client.recv(1 << 16)  # the answer has begun
        limit.write_text("100")

        service.kill()

        with suppress(ConnectionResetError):
            while more := client.recv(1 << 16):
                answer += more
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 400" not in answer
        assert b"[DONE]" not in answer


@pytest.mark.parametrize("ending", ["X-Request-Id: abc\r\n", slow("Connection: close\r\n")])
def test_trailers_of_a_request_are_no_headers(service: Service, ending: str) -> None:
    data = KINDS["chat"].partition(b"\r\n\r\n")[2]
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\n"
        f"{len(data):x}\r\n".encode()
        + data
        + f"\r\n0\r\n{ending}\r\n".encode()
    )
    plain = service.ask(request)

    with service.killed_after(50):
        answer = service.ask(request)

    assert (answer.error, answer.bodies) == ("", plain.bodies)


@pytest.mark.slow
def test_a_request_at_which_processes_die_in_a_row_is_given_up() -> None:
    with serving() as service:
        service.engine.step_s = 600.0  # the request does not end before the last death
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(service.ask(KINDS["chat"])))
        asking.start()
        submitted = service.engine.submitted

        # A death counts against the request only if the process had received the request.
        for num_before in range(MAX_LOSSES):
            until(lambda num=num_before: len(submitted) > num, WAIT_S)
            service.kill()

        asking.join()
        assert answers[0].error
