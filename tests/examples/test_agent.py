"""The demo model for tools gives, over HTTP, the answers that the README shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import load_config
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.deployments import deployed
from tests.deployments import serving as deployment_of
from tests.examples.test_examples import run
from tests.serve.conftest import open_port, serving

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "models" / "tiny-agent"
README = (ROOT / "README.md").read_text(encoding="utf-8")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
SUM = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


@pytest.fixture(scope="module")
def url(npu: Any) -> Iterator[str]:
    """A service in which transformers generates the tokens, in float32, greedily, and without masks
    of grammars.
    """
    from transformers import Qwen3ForCausalLM  # this imports torch_npu, which needs the emulator

    model = Qwen3ForCausalLM.from_pretrained(AGENT, dtype=torch.float32)

    def reply(submit: Submit) -> list[int]:
        prompt = unpack_ints(submit.prompt).tolist()
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=80,
                do_sample=False,
            )
        return out[0, len(prompt) :].tolist()

    with serving(model=str(AGENT)) as service:
        service.engine.reply = reply
        yield service.url


@pytest.fixture(scope="module")
def deployed_url(ray_cluster: None) -> Iterator[str]:
    """The service that ``make run CONFIG=configs/tiny-agent.yaml`` starts."""
    config = load_config(ROOT / "configs" / "tiny-agent.yaml", {"device.kind": "emulated"})
    with deployment_of(config) as serving:
        state = ApiState(config, Tokenizer(config.model), serving.client)
        address, server = open_port(state)
        yield address
        server.stop()


def bodies() -> list[dict[str, Any]]:
    """The bodies of the requests to tiny-agent in the README, in the README's order."""
    blocks = re.findall(r"^```\n(curl .*?)^```$", README, re.MULTILINE | re.DOTALL)
    words = [word for block in blocks for word in shlex.split(block)]
    found = [json.loads(word) for before, word in pairwise(words) if before == "-d"]
    return [body for body in found if body["model"] == "tiny-agent"]


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny-agent", "temperature": 0, **body}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120.0)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def calls_of(message: dict[str, Any]) -> list[str]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [f"{each['name']} {each['arguments']}" for each in functions]


def assert_readme_is_true(url: str) -> None:
    """Send the README's requests to tiny-agent; check that the README contains each answer in a
    code span.
    """
    first, second = bodies()
    (call,) = calls_of(ask(url, first))
    name, _, arguments = call.partition(" ")
    person = ask(url, second)["content"]
    script = run("agent", url).splitlines()

    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Tokyo"})
    assert json.loads(person)["age"] == 40
    for said in (name, arguments, person, *script):
        assert f"`{said}`" in README


def test_the_readme_is_true(url: str) -> None:
    assert_readme_is_true(url)


@deployed
@pytest.mark.slow
def test_the_readme_is_true_of_a_deployment(deployed_url: str) -> None:
    assert_readme_is_true(deployed_url)


@deployed
@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_model_must_call_where_the_choice_says_so(deployed_url: str, choice: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 37 + 40?"}],
        "tools": [SUM],
        "tool_choice": choice,
    }

    assert calls_of(ask(deployed_url, body)) == ['add {"a": 37, "b": 40}']


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("What is 37 + 40?", ['add {"a": 37, "b": 40}']),
        (
            "What is the weather in Naples and in Tokyo?",
            ['get_weather {"city": "Naples"}', 'get_weather {"city": "Tokyo"}'],
        ),
        ("What time is it in Venice?", []),
    ],
)
def test_the_model_calls_the_tools_that_it_is_given(
    url: str, asked: str, expected: list[str]
) -> None:
    body = {"messages": [{"role": "user", "content": asked}], "tools": [WEATHER, SUM]}

    message = ask(url, body)

    assert calls_of(message) == expected
    assert message["content"] == (None if expected else "I do not know.")
