"""The API works below a route prefix. Ray Serve's proxy passes on the whole path, and names the
prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.access import Access
from dist_aclgraph.serve.http.api_keys import ApiKey, ApiKeys
from tests.serve.conftest import Service, serving
from tests.serve.openai.test_errors import MODEL, TEXT, assert_error

PREFIX = "/qwen3"
KEY = "0123456789abcdef-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": MODEL, "prompt": [70, 71], "max_tokens": 3}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as service:
        yield service


def ask(service: Service, method: str, path: str, **request: Any) -> httpx.Response:
    """Send a request to the API as Ray Serve's proxy does."""
    access = Access(ApiKeys(fixed=(ApiKey.of(KEY),)))
    api = make_api(service.state, access, names_requests=False)

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(api, root_path=PREFIX)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return await client.request(method, path, **request)

    return asyncio.run(answer())


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
def test_probes_and_the_page_need_no_key(service: Service, path: str) -> None:
    assert ask(service, "GET", PREFIX + path).status_code == 200


def test_the_prefix_alone_leads_to_the_page(service: Service) -> None:
    """The status page requests relative URLs, so its own address must end with a slash."""
    reply = ask(service, "GET", PREFIX)

    assert (reply.status_code, reply.headers["location"]) == (307, f"http://proxy{PREFIX}/")
    assert 'fetch("status.json"' in ask(service, "GET", f"{PREFIX}/").text


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/status.json", PREFIX, "/x/health"])
def test_all_else_needs_one(service: Service, path: str) -> None:
    assert_error(ask(service, "GET", PREFIX + path), 401)


def test_a_path_that_only_begins_like_the_prefix_is_no_path_of_ours(service: Service) -> None:
    assert_error(ask(service, "GET", f"{PREFIX}health"), 401)


def test_completions_take_places_and_give_them_back(service: Service) -> None:
    found = []
    service.engine.reply = lambda submit: found.append(service.state.slots.taken) or [65, 66, 67]

    assert ask(service, "POST", PREFIX + TEXT, json=BODY, headers=BEARER).status_code == 200
    assert found == [1]
    assert service.state.slots.taken == 0


def test_a_full_service_refuses(service: Service) -> None:
    slots = service.state.slots
    num_free = service.state.config.scheduler.max_waiting + 16
    slots.acquire(num_free)

    reply = ask(service, "POST", PREFIX + TEXT, json=BODY, headers=BEARER)

    slots.release(num_free)
    assert_error(reply, 503)
