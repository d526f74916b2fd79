"""From the same config.json, the service and transformers read the same rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.model_config import FULL_ATTENTION, SLIDING_ATTENTION
from dist_aclgraph.shapes.rope_spec import RopeSpec

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096,
    "sliding_window": 8,
}  # fmt: skip
GEMMA, OLMO = ("Gemma3ForCausalLM", "gemma3_text"), ("Olmo3ForCausalLM", "olmo3")
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
DEFAULT = {"rope_type": "default"}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write(directory: Path, family: tuple[str, str], **keys: Any) -> None:
    architecture, model_type = family
    names = {"architectures": [architecture], "model_type": model_type}
    config = {**SIZES, **names, **keys}
    if architecture.endswith("ForConditionalGeneration"):
        text_type = f"{model_type}_text"
        config = {**names, "text_config": {**SIZES, **keys, "model_type": text_type}}
    (directory / "config.json").write_text(json.dumps(config))


def values(rope: RopeSpec | dict[str, Any]) -> tuple[Any, ...]:
    if isinstance(rope, RopeSpec):
        return rope.kind, rope.theta, rope.factor
    return rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)


@pytest.mark.parametrize("family", [GEMMA, OLMO], ids=lambda family: family[0])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 3e5, "rope_scaling": YARN},
        {"rope_theta": 3e5, "rope_scaling": {**LINEAR, "rope_theta": 2e5}},
        {"rope_parameters": {FULL_ATTENTION: {**LINEAR, "rope_theta": 2e5}}},
        {"rope_parameters": {SLIDING_ATTENTION: LINEAR}},
        {"rope_parameters": {FULL_ATTENTION: DEFAULT}, "rope_scaling": LINEAR},
        {"rope_parameters": DEFAULT, "rope_theta": 3e5},
    ],
    ids=lambda keys: "-".join(keys) or "none",
)
def test_embeddings_of_types_of_layers_are_those_of_transformers(
    tmp_path: Path, family: tuple[str, str], keys: dict[str, Any]
) -> None:
    write(tmp_path, family, **keys)
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters

    spec = read_model_spec(tmp_path)

    assert spec.other_rope is not None
    assert values(spec.rope) == values(expected[FULL_ATTENTION])
    assert values(spec.other_rope.rope) == values(expected[SLIDING_ATTENTION])


@pytest.mark.parametrize("family", [GEMMA, OLMO], ids=lambda family: family[0])
@pytest.mark.parametrize("flat", [LINEAR, YARN, {**DEFAULT, "rope_theta": 2e5}])
def test_an_embedding_that_transformers_ignores_is_refused(
    tmp_path: Path, family: tuple[str, str], flat: dict[str, Any]
) -> None:
    """It is not clear whether the embedding is meant for layers without a window. Only an override
    can decide this.
    """
    write(tmp_path, family, rope_parameters=flat, rope_theta=3e5)
    ignored = AutoConfig.from_pretrained(tmp_path).rope_parameters[FULL_ATTENTION]
    assert values(ignored) == ("default", 3e5, 1.0)

    with pytest.raises(UnsupportedModelError, match="transformers ignores its"):
        read_model_spec(tmp_path)
    overridden = read_model_spec(tmp_path, {"rope_scaling": LINEAR, "rope_theta": 1e6})
    assert values(overridden.rope) == ("linear", 1e6, 8.0)


@pytest.mark.parametrize(
    "family",
    [
        ("GlmForCausalLM", "glm"),
        ("Glm4ForCausalLM", "glm4"),
        ("Glm4MoeForCausalLM", "glm4_moe"),
        ("Glm4vForConditionalGeneration", "glm4v"),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe"),
    ],
    ids=lambda family: family[0],
)
@pytest.mark.parametrize("keys", [{}, {"partial_rotary_factor": 0.25}], ids=["absent", "quarter"])
def test_the_rotated_part_is_that_of_transformers(
    tmp_path: Path, family: tuple[str, str], keys: dict[str, Any]
) -> None:
    write(tmp_path, family, **keys, **EXPERTS, head_dim=32)
    rope = AutoConfig.from_pretrained(tmp_path).get_text_config().rope_parameters

    assert read_model_spec(tmp_path).rotary_dim == 32 * rope.get("partial_rotary_factor", 1.0)


def test_sections_that_do_not_fit_the_rotated_part_are_refused(tmp_path: Path) -> None:
    """transformers cannot run such a model, so it is unknown which part would be rotated."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    family = ("Glm4vForConditionalGeneration", "glm4v")
    write(tmp_path, family, head_dim=32, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    assert read_model_spec(tmp_path).rotary_dim == 16

    write(tmp_path, family, head_dim=32, rope_parameters=rope)
    with pytest.raises(ModelError, match=r"mrope_section has 8 frequencies.*32 elements.*16"):
        read_model_spec(tmp_path)
