"""The library ``guidance`` sends grammars with its class for vLLM, and answers follow these
grammars.
"""

from __future__ import annotations

import re

from tests.clients.conftest import run_python

CODE = """
import json, os
import guidance
from guidance import assistant, gen, select, user
from guidance.models.experimental import VLLMModel
def ask(rule):
    model = VLLMModel("tiny-agent", api_key="none", base_url=os.environ["API"])
    with user():
        model += "Give me a person as JSON: Ida, 40 years old."
    with assistant():
        model += rule
    return model["found"]
schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
print(json.dumps({
    "regex": ask(gen("found", regex="[a-c]{3}")),
    "choice": ask("Answer: " + select(["yes", "no"], name="found")),
    "json": json.loads(ask(guidance.json("found", schema=schema))),
}))
"""


def test_guidance_restricts_answers(agent):
    found = run_python("guidance", CODE, API=agent.api)

    assert re.fullmatch("[a-c]{3}", found["regex"])
    assert found["choice"] in ("yes", "no")
    assert isinstance(found["json"]["name"], str)
