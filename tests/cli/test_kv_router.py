"""A router such as llm-d's sends a request to one service, which computes the prompt, and then to
another service, which generates the answer. The services share a secret, but no files.
"""

from __future__ import annotations

import base64
import re
import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from tests.actors.leftovers import wait_until
from tests.cli.test_changing_groups import WAIT_S
from tests.cli.test_recovery import Service
from tests.serve.openai.test_kv_transfer import DECODE_ELSEWHERE

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

BLOCK, NUM_TOKENS = 16, 12
HOST = "127.0.0.5"  # the address at which the first service listens to send files
FILES = f"kv.block_size={BLOCK}", "kv.host_gib=0.05", "graph.sizes=[4]"
firsts = count(300)  # the first token of each prompt differs, so that no two prompts share a prefix
Params = dict[str, Any]


def make_prompt() -> list[int]:
    return [next(firsts), *range(5, 204)]


class Router:
    """Sends requests as the sidecar of llm-d does with its connector nixlv2."""

    def __init__(self, prefill: Service, decode: Service) -> None:
        self.prefill, self.decode = prefill, decode

    def begin(self, body: dict[str, Any]) -> Params:
        """Let the first service compute a prompt; return the parameters that it returns for the
        second service.
        """
        limits = {"stream": False, "max_tokens": 1}
        reply = post(self.prefill, {**body, **limits, "kv_transfer_params": DECODE_ELSEWHERE})
        found: Params = reply["kv_transfer_params"]
        return found

    def go_on(self, body: dict[str, Any], params: Params) -> tuple[list[int], int, float]:
        """Let the second service generate; return its tokens, the number of cached prompt tokens,
        and the number of blocks that it has fetched so far.
        """
        before = counted(self.decode, "kv_fetched_blocks_total")
        reply = post(self.decode, {**body, "kv_transfer_params": params})
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        num_fetched = counted(self.decode, "kv_fetched_blocks_total") - before
        return reply["choices"][0]["token_ids"], cached, num_fetched


def post(service: Service, body: dict[str, Any]) -> Any:
    reply = service.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def counted(service: Service, name: str) -> float:
    text = service.http.get("/metrics").text
    return sum(map(float, re.findall(rf"^dist_aclgraph_{name}\{{.*\}} (\S+)$", text, re.M)))


def make_body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny-qwen3", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    key = tmp_path_factory.mktemp("secret") / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef" * 4)
    folders = [tmp_path_factory.mktemp(name) for name in ("prefill", "decode")]
    services = [
        Service(*FILES, f"kv.host_path={folder}", f"kv.peers_key_file={key}", *more)
        for folder, more in zip(folders, ([f"kv.peers_host={HOST}"], []), strict=True)
    ]
    try:
        for service in services:
            service.wait_until_ready()
        yield Router(*services)
    finally:
        for service in services:
            service.close()


def test_the_second_service_fetches_the_blocks_of_the_first(router: Router) -> None:
    body = make_body(make_prompt())

    params = router.begin(body)
    tokens, cached, num_fetched = router.go_on(body, params)

    num_blocks = len(body["prompt"]) // BLOCK
    assert (params["remote_host"], params["remote_port"] > 0) == (HOST, True)
    assert (cached, num_fetched) == (num_blocks * BLOCK, num_blocks)
    assert tokens == post(router.prefill, body)["choices"][0]["token_ids"]


def changed(params: Params) -> Params:
    found = bytearray(base64.urlsafe_b64decode(params["remote_ticket"]))
    found[len(found) // 2] ^= 1
    return {**params, "remote_ticket": base64.urlsafe_b64encode(found).decode()}


@pytest.mark.parametrize(
    "change",
    [
        changed,
        lambda params: {k: v for k, v in params.items() if k != "remote_ticket"},
        lambda params: {**params, "remote_host": "127.0.0.9"},
        lambda params: {**params, "remote_port": [1]},
        lambda params: {**params, "remote_ticket": {"tcp": "127.0.0.1"}},
        lambda params: {**params, "remote_ticket": "A" * 100_000},
    ],
    ids=["changed", "none", "host", "port", "object", "long"],
)
def test_nothing_is_fetched_by_wrong_parameters(
    router: Router, change: Callable[[Params], Params]
) -> None:
    body = make_body(make_prompt())

    tokens, cached, num_fetched = router.go_on(body, change(router.begin(body)))

    assert (cached, num_fetched) == (0, 0)
    assert tokens == post(router.prefill, body)["choices"][0]["token_ids"]


def test_requests_with_other_salts_share_nothing(router: Router) -> None:
    body = make_body(make_prompt())

    params = router.begin({**body, "cache_salt": "one"})

    assert router.go_on({**body, "cache_salt": "two"}, params)[1:] == (0, 0)
    assert router.go_on({**body, "cache_salt": "one"}, params)[2] > 0


def test_the_prompt_is_computed_if_the_first_service_is_gone(router: Router) -> None:
    """This test must be the last one, because it ends the first service."""
    body = make_body(make_prompt())
    wanted = post(router.decode, {**body, "cache_salt": "alone"})["choices"][0]["token_ids"]
    params = router.begin(body)
    router.prefill.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not router.prefill.pids("ray::Engine"), "an engine lives", WAIT_S)

    assert router.go_on(body, params) == (wanted, 0, 0)
