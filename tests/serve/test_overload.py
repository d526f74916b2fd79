"""Beyond its places the service refuses at once, before it reads what was sent."""

from __future__ import annotations

import asyncio
import json
import resource
import time

import pytest

from tests.serve.conftest import serving, until
from tests.serve.test_errors import CHAT, HI, MODEL, TEXT, assert_error

NUM_PLACES = 4 + 16  # scheduler.max_waiting and max_num_seqs
NUM_CLIENTS = 1000
HANGING = {"model": MODEL, "prompt": [70], "max_tokens": 2000, "stream": True}


@pytest.fixture(scope="module")
def full():
    """A service all of whose places are taken by streams that do not end."""
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
    """What is no JSON is refused for the lack of a place, not for what it is."""
    assert_error(full.http.post(CHAT, content=b"{" * 1000), 503)


def test_a_place_that_becomes_free_is_given_away(own_service):
    service = own_service
    places = service.state.places

    for _ in range(3):
        service.http.post(TEXT, json={"model": MODEL, "prompt": [70], "n": 5, "max_tokens": 1})
        service.http.post(TEXT, content=b"nonsense")

    until(lambda: places.taken == 0)


def test_more_choices_than_places_are_refused(own_service):
    service = own_service
    total = service.state.config.scheduler.max_waiting + 16
    service.state.places.take(total - 2)

    reply = service.http.post(TEXT, json={"model": MODEL, "prompt": [70], "n": 3, "max_tokens": 1})

    assert_error(reply, 503)
    until(lambda: service.state.places.taken == total - 2)  # given back behind the answer


def test_a_thousand_clients_at_once_are_refused_as_fast_as_they_can_be_answered(full):
    """Compared with the cheapest answer there is: the waiting is that of a thousand answers."""
    body = json.dumps({"model": MODEL, "messages": HI}).encode()
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )

    refused = asyncio.run(ask_all(full, post + body, 503))
    answered = asyncio.run(ask_all(full, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n", 200))

    assert percentile(refused, 0.99) < 3 * percentile(answered, 0.99)


async def ask_all(service, request: bytes, status: int) -> list[float]:
    """Return the seconds from each request to the first line of its answer, all sent at once."""
    port = service.http.base_url.port
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * NUM_CLIENTS), hard))
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_CLIENTS)]
    began_s = time.perf_counter()
    for _, writer in streams:
        writer.write(request)

    async def wait(reader: asyncio.StreamReader) -> float:
        line = await reader.readline()
        assert line.split()[1] == str(status).encode()
        return time.perf_counter() - began_s

    found = await asyncio.gather(*(wait(reader) for reader, _ in streams))
    for _, writer in streams:
        writer.close()
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
