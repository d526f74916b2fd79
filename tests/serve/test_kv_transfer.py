"""A router lets one service compute a prompt, and another service continue it, as with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.scheduler.routing import block_hashes
from tests.serve.conftest import Service, serving
from tests.serve.test_errors import assert_error

# The parameters that vLLM's proxies send to the service that computes the prompt.
DECODE_ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PROMPT = list(range(5, 305))
MODEL = "tiny-qwen3"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield a service that keeps copies of KV; the fake engine writes no files."""
    folder = str(tmp_path_factory.mktemp("files"))
    with serving(kv={"host_gib": 0.01, "host_path": folder}) as service:
        yield service


def complete(service: Service, params: Any, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **more}
    return service.http.post("/v1/completions", json={**body, "kv_transfer_params": params})


def test_the_answer_names_the_files_of_the_prompt(keeping: Service) -> None:
    reply = complete(keeping, DECODE_ELSEWHERE, cache_salt="s").json()

    (group,) = keeping.state.client._table.router._groups.values()
    size = group.tokens_per_block
    names = [each.hex() for each in block_hashes(pack_ints(PROMPT), "s", size)]
    assert names and reply["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": MODEL,
        "remote_block_ids": names,
        "remote_host": None,
        "remote_port": None,
    }
    assert keeping.engine.submitted[-1].hands_over, "the engine ends it when the files are complete"


def test_the_other_service_continues(keeping: Service) -> None:
    params = complete(keeping, DECODE_ELSEWHERE).json()["kv_transfer_params"]

    reply = complete(keeping, params, max_tokens=3).json()

    assert reply["choices"][0]["finish_reason"] == "length"
    assert "kv_transfer_params" not in reply
    assert not keeping.engine.submitted[-1].hands_over


def test_an_answer_that_is_complete_has_no_parameters(keeping: Service) -> None:
    keeping.answer("")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}

    reply = keeping.http.post(
        "/v1/chat/completions", json={**body, "kv_transfer_params": DECODE_ELSEWHERE}
    ).json()

    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["kv_transfer_params"] is None


@pytest.mark.parametrize(
    ("params", "more", "words"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "are both true"),
        (DECODE_ELSEWHERE, {"stream": True}, "n 1 and stream false"),
        (DECODE_ELSEWHERE, {"n": 2}, "n 1 and stream false"),
        (DECODE_ELSEWHERE, {"prompt": ["a", "b"]}, "one prompt"),
        ({"do_remote_decode": "yes"}, {}, "kv_transfer_params.do_remote_decode: expected bool"),
        ("x", {}, "kv_transfer_params"),
    ],
)
def test_parameters_that_cannot_be_are_refused(
    keeping: Service, params: Any, more: dict[str, Any], words: str
) -> None:
    reply = complete(keeping, params, **more)

    assert words in assert_error(reply)["message"]


def test_a_service_without_copies_only_continues(service: Service) -> None:
    reply = complete(service, DECODE_ELSEWHERE)

    assert "kv.host_gib or kv.disk" in assert_error(reply)["message"]
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "tp_size": 8}
    assert complete(service, params).status_code == 200
