"""The demo model for tools calls a tool, and generates the same tokens as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dist_aclgraph.text.chat_template import ChatOptions
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.checkpoints import greedy
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep

AGENT = Path(__file__).parents[3] / "models" / "tiny-agent"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
QUESTION = {"role": "user", "content": "What is the weather in Tokyo?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
HISTORY = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Tokyo"}},
            }
        ],
    },
    {"role": "tool", "content": '{"weather": "sunny", "celsius": 21}'},
]


def test_a_call_has_the_tokens_of_transformers(npu: Any) -> None:
    from transformers import Qwen3ForCausalLM  # this imports torch_npu, which needs the emulator

    tokenizer = Tokenizer(AGENT)
    prompt = tokenizer.encode_chat([QUESTION], ChatOptions(tools=[TOOL]), max_tokens=2048)
    expected = [*tokenizer.encode(CALL), tokenizer.eos_ids[0]]
    model = Qwen3ForCausalLM.from_pretrained(AGENT, dtype=torch.float32)

    with lockstep(make_deployment_config(AGENT, parallel={"tp": 2})) as group:
        (answer,) = group.generate([prompt], greedy_params(len(expected)))

    assert answer.tokens == greedy(model, [prompt], len(expected))[0] == expected


def test_a_call_and_its_result_are_a_prompt_as_transformers_makes_it(npu: Any) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(AGENT)

    ours = Tokenizer(AGENT).encode_chat(HISTORY, ChatOptions(tools=[TOOL]), max_tokens=2048)

    assert ours == theirs.apply_chat_template(
        HISTORY, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
