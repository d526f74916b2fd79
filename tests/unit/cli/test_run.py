"""``dist-aclgraph run`` prints the answers of a deployment. A stub replaces the deployment here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from dist_aclgraph.actors.deployment.outputs import CompletionOutput, RequestOutput
from dist_aclgraph.cli import run as command
from dist_aclgraph.config import make_config
from dist_aclgraph.sampling import SamplingParams


class StubLLM:
    """Answers each prompt with the prompt in upper case."""

    def report(self) -> dict[str, Any]:
        return {}

    def generate(self, prompts: Sequence[str], *args: Any, **keys: Any) -> list[RequestOutput]:
        return [
            RequestOutput(str(i), text, [1], outputs=[CompletionOutput(0, text.upper(), [7, 8])])
            for i, text in enumerate(prompts)
        ]


@pytest.mark.parametrize("as_json", [False, True])
def test_each_answer_is_printed_with_its_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(command, "check_deployment", lambda config: config)
    monkeypatch.setattr(command, "keep_report", lambda *args: None)
    monkeypatch.setattr(command, "_started", lambda *args: nullcontext(StubLLM()))

    config = make_config({"model": "-"})
    command.run(config, ["one", "two"], SamplingParams(), raw=True, as_json=as_json)

    lines = capsys.readouterr().out.splitlines()
    if as_json:
        found = [json.loads(line) for line in lines]
        texts = {each["prompt"]: each["text"] for each in found}
        assert texts == {"one": "ONE", "two": "TWO"}
        assert found[0]["token_ids"] == [7, 8]
    else:
        assert lines == ["> one", "ONE", "> two", "TWO"]
