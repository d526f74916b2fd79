"""A config.json without ``architectures`` is read as the model class that transformers would
choose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dist_aclgraph.errors import UnsupportedModelError
from dist_aclgraph.shapes.families import READERS, read_model_spec
from dist_aclgraph.shapes.family_keys import ARCHITECTURES
from dist_aclgraph.shapes.model_config import read_model_config

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"
# The published files of these types use other keys than Llama.
KEPT_NAMES = {"internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM"}


def architecture_of(directory: Path, **keys: Any) -> str:
    (directory / "config.json").write_text(json.dumps(keys))
    return read_model_config(directory).architecture


def test_each_type_of_transformers_that_is_served_has_the_class_of_transformers() -> None:
    texts, images = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    # In a checkpoint with an image encoder, weights are named as in the model class for images.
    named = {**texts, **images, **KEPT_NAMES}
    served = {kind: name for kind, name in named.items() if name in READERS}
    del served["shieldgemma2"]  # gives scores of safety

    assert {kind: ARCHITECTURES.get(kind) for kind in served} == served


def test_each_architecture_has_a_type() -> None:
    assert set(ARCHITECTURES.values()) == READERS.keys()


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.iterdir() if path.is_dir()))
def test_a_published_file_is_read_without_its_architectures(tmp_path: Path, name: str) -> None:
    config = json.loads((SHAPES / name / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_model_spec(tmp_path) == read_model_spec(SHAPES / name)


def test_the_type_of_a_part_is_not_that_of_the_model(tmp_path: Path) -> None:
    text = {"text_config": {"model_type": "ministral3", "architectures": ["A"]}}

    assert architecture_of(tmp_path, model_type="mistral3", **text) == (
        "Mistral3ForConditionalGeneration"
    )
    assert architecture_of(tmp_path, model_type="qwen3", architectures=[]) == "Qwen3ForCausalLM"
    assert architecture_of(tmp_path, model_type="qwen3", architectures=["A"]) == "A"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "has neither architectures nor model_type"),
        (
            {"model_type": "gpt2"},
            "no architectures, and no supported model has the model_type gpt2",
        ),
        ({"model_type": "a", "text_config": {"model_type": "llama"}}, "has the model_type a;"),
    ],
)
def test_an_unknown_model_is_refused(tmp_path: Path, keys: dict[str, Any], sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(keys))

    with pytest.raises(UnsupportedModelError, match=sentence):
        read_model_spec(tmp_path)
