"""A model's task follows from the configuration and from the files of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.model_task import ModelTask, read_task

KINDS = "sentence_transformers.models."
LAST = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "include_prompt": True}


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": KINDS + kind}


STEPS = [module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")]


def make_checkpoint(
    directory: Path, steps: Any = None, pooling: Any = None, **settings: Any
) -> Path:
    text = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, **settings}
    (directory / "config.json").write_text(json.dumps(text))
    save_file({"embed_tokens.weight": torch.zeros(1)}, directory / "model.safetensors")
    if steps is not None:
        (directory / "modules.json").write_text(json.dumps(steps))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def task(directory: Path, **keys: Any) -> ModelTask:
    return read_task(make_config({"model": str(directory), **keys}))


@pytest.mark.parametrize(
    ("steps", "normalizes"), [(STEPS, True), (STEPS[:2], False)], ids=["normalised", "as it is"]
)
@pytest.mark.parametrize("pooling", [LAST, {"pooling_mode": "lasttoken"}], ids=["flags", "name"])
def test_a_checkpoint_with_pooling_embeds(
    tmp_path: Path, steps: Any, normalizes: bool, pooling: Any
) -> None:
    assert task(make_checkpoint(tmp_path, steps, pooling)) == ModelTask("embed", normalizes, 8)


def test_the_key_decides_where_it_is_set(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)

    found = [task(tmp_path, task=name) for name in ("auto", "generate", "embed", "rerank")]

    assert [each.name for each in found] == ["generate", "generate", "embed", "rerank"]
    assert found[2].normalizes


@pytest.mark.parametrize(
    ("steps", "pooling", "words"),
    [
        (STEPS, {"pooling_mode_mean_tokens": True}, "pools by mean_tokens; only lasttoken"),
        (STEPS, {"pooling_mode_cls_token": True, **LAST}, "pools by cls_token, lasttoken; only"),
        (STEPS, {"pooling_mode": "mean"}, "pools by mean; only"),
        (STEPS, {}, "pools by nothing; only"),
        (STEPS, None, "cannot read"),
        ([*STEPS, module("Dense", "3_Dense")], LAST, "Normalize, Dense; embeddings are made by"),
        ([module("Transformer"), module("Pooling", "../x")], LAST, "outside the directory"),
        ([{"type": 1}], LAST, "without a type and a path"),
        ({}, LAST, "must hold a list of objects"),
        ([1], LAST, "must hold a list of objects"),
    ],
)
def test_another_way_to_an_embedding_is_one_sentence(
    tmp_path: Path, steps: Any, pooling: Any, words: str
) -> None:
    with pytest.raises(ModelError, match=words) as e:
        task(make_checkpoint(tmp_path, steps, pooling))

    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["generate", "rerank"])
def test_a_decoder_without_a_head_only_embeds(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path)

    with pytest.raises(UnsupportedModelError, match="no output head: set task=embed"):
        task(tmp_path, task=name)
    assert task(tmp_path, task="embed").name == "embed"
    assert task(tmp_path, task=name, weights="dummy").name == name
