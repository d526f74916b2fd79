"""A completion with a suffix fills the gap between prompt and suffix, if the tokenizer has markers
for the gap.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.text.infill import FORMS, markers_of
from tests.serve.conftest import CONFIG, serving
from tests.serve.openai.test_errors import assert_error

MODEL = CONFIG.parents[1] / "models" / "tiny-qwen3"
TEXT = "/v1/completions"
# For each tokenizer: the prompt in the form of the model card, with "ab" before the gap and "cd"
# after the gap.
PROMPTS = (
    "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>",
    "<fim_prefix>ab<fim_suffix>cd<fim_middle>",
    "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>",
    "<[fim-suffix]>cd<[fim-prefix]>ab<[fim-middle]>",
    "[SUFFIX]cd[PREFIX]ab",
)


def write_model(folder: Path, markers: list[str]) -> None:
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    known = tokenizer["added_tokens"][0]
    for marker in markers:
        tokenizer["added_tokens"].append(known | {"id": config["vocab_size"], "content": marker})
        config["vocab_size"] += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("form", "prompt"), list(zip(FORMS, PROMPTS, strict=True)))
def test_the_model_gets_both_texts_between_its_markers(tmp_path, form, prompt):
    markers = markers_of(form)
    write_model(tmp_path / "model", markers)

    with serving(model=str(tmp_path / "model")) as service:
        service.answer("x")
        client = service.openai.completions
        reply = client.create(model="model", prompt="ab", suffix="cd", max_tokens=1)
        ids = unpack_ints(service.engine.submitted[0].prompt).tolist()
        tokenizer = service.state.tokenizer

    assert reply.choices[0].text == "x"
    assert reply.usage.prompt_tokens == len(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert {tokenizer.added_token(marker) for marker in markers} < set(ids)


def test_the_cursor_of_an_editor_may_be_at_the_beginning_of_a_text(tmp_path):
    write_model(tmp_path / "model", markers_of(FORMS[0]))

    with serving(model=str(tmp_path / "model")) as service:
        service.answer("x")
        client = service.openai.completions
        reply = client.create(model="model", prompt="", suffix="cd", max_tokens=1, n=2)
        stream = client.create(model="model", prompt=[""], suffix="cd", max_tokens=1, stream=True)
        pieces = "".join(chunk.choices[0].text for chunk in stream)
        found = [unpack_ints(each.prompt).tolist() for each in service.engine.submitted]
        decode = service.state.tokenizer.decode

    assert [choice.text for choice in reply.choices] == ["x", "x"]
    assert pieces == "x"
    asked = "<|fim_prefix|><|fim_suffix|>cd<|fim_middle|>"
    assert [decode(ids, skip_special_tokens=False) for ids in found] == [asked] * 3


@pytest.mark.parametrize("field", ["prompt", "suffix"])
def test_a_text_that_contains_a_marker_is_refused(tmp_path, field):
    markers = markers_of(FORMS[0])
    write_model(tmp_path / "model", markers)
    asked = {"model": "model", "prompt": "ab", "suffix": "cd", field: f"x = '{markers[2]}'"}

    with serving(model=str(tmp_path / "model")) as service:
        error = assert_error(service.http.post(TEXT, json=asked))

    assert error["param"] == field
    assert f"{field} contains the marker {markers[2]}" in error["message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "its tokenizer has markers such as <|fim_prefix|>"),
        ({"prompt": [1, 2]}, "prompt must be one text"),
        ({"prompt": []}, "prompt must be one text"),
        # If several prompts were allowed, each would contain the suffix. So a small body could make
        # many long prompts.
        ({"prompt": ["ab", "ef"]}, "prompt must be one text"),
        ({"echo": True}, "cannot be combined with echo"),
        # The truncation would cut off the markers at the beginning.
        ({"truncate_prompt_tokens": 3}, "cannot be combined with truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1}, "cannot be combined with truncate_prompt_tokens"),
        ({"prompt": "", "suffix": ""}, "prompt must not be empty"),
        ({"suffix": ["cd"]}, "suffix"),
    ],
)
def test_other_requests_with_a_suffix_are_refused_in_one_sentence(service, changes, words):
    asked = {"model": "tiny-qwen3", "prompt": "ab", "suffix": "cd", **changes}

    assert words in assert_error(service.http.post(TEXT, json=asked))["message"]
