from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.config import load_config
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.server import HttpServer, listen
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.holder import HolderLink
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine, echo
from tests.serve.tooled import MODEL, write_checkpoint

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-qwen3.yaml"


@dataclass
class Service:
    """A running HTTP service over a fake engine."""

    url: str
    state: ApiState
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop
    http: httpx.Client
    openai: openai.OpenAI

    def answer(self, text: str) -> None:
        """Make every request generate ``text`` and then the end token."""
        ids = [*self.state.tokenizer.encode(text), self.state.tokenizer.eos_ids[0]]
        self.engine.reply = lambda submit: ids


WAIT_S = 180.0  # seconds; tests never reach this limit on an idle machine
# Seconds after which an engine counts as silent, in tests in which engines fall silent. It is more
# than a second, because on a busy machine the thread of a fake engine may get no CPU time for a
# second.
SILENT_S = 2.0


def until(condition, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_port(state: ApiState, access: Access | None = None) -> tuple[str, HttpServer]:
    """Serve the API; return its address and the server."""
    listener = listen("127.0.0.1", 0)
    # HttpServer requires a link to a process that holds connections. This fake link holds none.
    server = HttpServer(state.config.serve, listener, link=HolderLink())
    server.start(make_api(state, access))
    return f"http://127.0.0.1:{listener.getsockname()[1]}", server


def start(
    engine: FakeEngine,
    access: Access | None = None,
    other: FakeEngine | None = None,
    link_s: float = WAIT_S,
    **overrides: object,
) -> tuple[Service, HttpServer]:
    config = load_config(CONFIG, overrides)
    addresses = [found.address for found in (engine, other) if found is not None]
    client = EngineClient(addresses, TOKEN, node_id=NODE, link_s=link_s)
    state = ApiState(config, Tokenizer(config.model), client)
    url, server = open_port(state, access)
    service = Service(
        url,
        state,
        engine,
        server.loop,
        httpx.Client(base_url=url, timeout=WAIT_S),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S),
    )
    return service, server


@contextlib.contextmanager
def serving(
    access: Access | None = None,
    other: FakeEngine | None = None,
    link_s: float = WAIT_S,
    **overrides: object,
):
    """Run a new service with a new fake engine."""
    engine = FakeEngine()
    service, server = start(engine, access, other, link_s, **overrides)
    try:
        yield service
    finally:
        server.stop()
        service.state.client.close()
        engine.close()


@pytest.fixture(scope="session")
def shared_service():
    with serving() as service:
        yield service


@pytest.fixture(scope="session")
def shared_tooled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tooled")
    write_checkpoint(folder)
    with serving(model=str(folder), served_model_name=MODEL) as service:
        yield service


@pytest.fixture
def service(shared_service):
    """Return the shared service. Reset its engine to the initial state."""
    return as_new(shared_service)


@pytest.fixture
def tooled(shared_tooled):
    """Return the shared service with tools and reasoning. Reset its engine to the initial state."""
    return as_new(shared_tooled)


def as_new(service: Service) -> Service:
    engine = service.engine
    until(lambda: engine.num_running == 0)
    until(lambda: service.state.slots.taken == 0)  # the service releases slots after the answer
    engine.reply, engine.fail_after, engine.step_s = echo, None, 0.002
    engine.submitted.clear()
    engine.aborted.clear()
    return service


@pytest.fixture
def own_service():
    """Yield a new service, which the test may break."""
    with serving(link_s=SILENT_S) as service:
        yield service
