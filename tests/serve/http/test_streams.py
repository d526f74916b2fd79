"""The event loop is woken only once for all deltas of a step. Frames stay complete and in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import httpx
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.openai import sse
from dist_aclgraph.serve.openai.inbox import Inbox, Outbox
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import WAIT_S, open_port
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine

TURNS = st.lists(st.sampled_from(["put", "refuse", "turn", "slow"]), max_size=60)


@given(TURNS)
def test_all_frames_come_out_in_order_however_often_a_connection_takes_none(turns: list[str]):
    outlet, out, put = sse.Outlet(), bytearray(), bytearray()
    slow, takes = [0], [True]

    def write(body: bytes) -> bool:
        if takes[0]:
            out.extend(body)
        return takes[0]

    async def send(message) -> None:
        for _ in range(slow[0]):
            await asyncio.sleep(0)
        out.extend(message["body"])

    async def run() -> None:
        task = asyncio.ensure_future(outlet.send_to({"extensions": {sse.WRITE: write}}, send))
        for index, turn in enumerate(turns):
            if turn == "put":
                put.extend(b"%d;" % index)
                outlet.put(b"%d;" % index)
            elif turn == "refuse":
                takes[0] = not takes[0]
            elif turn == "slow":
                slow[0] = 3 - slow[0]
            else:
                await asyncio.sleep(0)
        outlet.end()
        await task

    asyncio.run(run())

    assert out == put


def test_deltas_that_arrive_together_wake_the_loop_once():
    async def run() -> tuple[list[str], int]:
        loop, taken = asyncio.get_running_loop(), []
        inbox = Inbox(loop)
        calls, called = [], loop.call_soon_threadsafe

        def count(*arguments):
            calls.append(arguments)
            return called(*arguments)

        loop.call_soon_threadsafe = count
        for name in "abc":
            inbox.put(lambda delta, now_s: taken.append(delta.request_id), RequestDelta(name))
        assert taken == []
        await asyncio.sleep(0)
        inbox.put(lambda delta, now_s: taken.append(delta.request_id), RequestDelta("d"))
        await asyncio.sleep(0)
        return taken, len(calls)

    taken, num_calls = asyncio.run(run())

    assert taken == ["a", "b", "c", "d"]
    assert num_calls == 2


def test_requests_that_are_submitted_together_wake_the_client_once():
    async def run() -> list[str]:
        loop, order = asyncio.get_running_loop(), []
        outbox = Outbox(loop, lambda: order.append("wake"))

        def submit(name: str) -> None:
            order.append(name)
            outbox.note()

        for name in "abc":
            loop.call_soon(submit, name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        submit("d")
        await asyncio.sleep(0)
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "wake", "d", "wake"]


class CountedClient(EngineClient):
    """Counts only wake-ups by the thread of an event loop. Other threads also wake the client, to
    ask for the state of engines.
    """

    num_wakes = 0

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            self.num_wakes += 1
        super().wake()


def test_all_choices_of_a_request_are_sent_by_one_wake_up(service):
    engine = FakeEngine()
    client = CountedClient([engine.address], TOKEN, node_id=NODE, link_s=WAIT_S)
    url, server = open_port(ApiState(service.state.config, service.state.tokenizer, client))
    body = {"model": "tiny-qwen3", "prompt": [70], "max_tokens": 2, "n": 3}

    response = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)

    server.stop()
    client.close()
    engine.close()
    assert (response.status_code, len(engine.submitted)) == (200, 3)
    assert client.num_wakes == 1


def test_deltas_of_a_loop_that_has_closed_harm_nobody():
    async def make() -> Inbox:
        return Inbox(asyncio.get_running_loop())

    inbox = asyncio.run(make())
    thread = threading.Thread(target=inbox.put, args=(print, RequestDelta("a")))
    thread.start()
    thread.join()


def test_frames_go_out_without_the_task_of_their_response(service):
    service.engine.reply = lambda submit: [70] * submit.max_tokens
    body = {"model": "tiny-qwen3", "prompt": [70], "max_tokens": 50, "stream": True}
    written, sent = [], []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/completions", "query_string": b"", "headers": [],
        "extensions": {sse.WRITE: lambda frames: written.append(frames) or True},
    }  # fmt: skip

    async def ask() -> None:
        messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive():
            return next(messages, None) or await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        await make_api(service.state)(scope, receive, send)

    asyncio.run(ask())

    first, *rest = sent
    assert first["type"] == "http.response.start"
    assert b"".join([*(message["body"] for message in rest), *written]).count(b"data: ") == 51
    assert len(written) > 40
