"""The context length is derived from config.json as in vLLM. Contradictory keys of the rotary
embedding are refused.

``tests/engine/layers/test_rotary.py`` compares the frequencies with those of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.shapes.rope_spec import read_rope_spec

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "max_position_embeddings": 32768,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
GROWING = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def write(directory: Path, **keys: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **keys}))
    return directory


def read(**keys: Any) -> ModelConfig:
    return ModelConfig(Path("config.json"), {**SHAPE, **keys}, {})


@pytest.mark.parametrize(
    ("keys", "longest", "usual"),
    [
        ({}, 32768, 32768),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072, 131072),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                },
                "max_position_embeddings": 163840,
            },
            163840,
            163840,
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": None},
                "original_max_position_embeddings": 8,
            },
            32768,
            32768,
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0},
                "original_max_position_embeddings": 8,
            },
            32768,
            32768,
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 81920, 81920),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 65536, 65536),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32768, 32768),
        (
            {"rope_scaling": LONG | {"type": "su"}, "original_max_position_embeddings": 4096},
            32768,
            4096,
        ),
        (
            {"rope_scaling": LONG | {"type": "yarn"}, "original_max_position_embeddings": 4096},
            32768,
            4096,
        ),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 4096}, 32768, 4096),
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 4096}}, 32768, 4096),
        ({"rope_scaling": LONG}, 32768, 32768),
        ({"rope_scaling": {"type": "of another architecture", "factor": 4}}, 32768, 32768),
        ({"rope_parameters": GROWING}, 32768, 32768),
        ({"model_max_length": 65536}, 65536, 65536),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_the_context_counts_the_scaling(
    tmp_path: Path, keys: dict[str, Any], longest: int, usual: int
) -> None:
    facts = read_model_facts(write(tmp_path, **keys))
    default, short = (make_config({"model": "m", "max_model_len": n}) for n in (None, 64))

    assert facts.context_len == longest
    assert facts.max_model_len(default) == usual
    assert facts.max_model_len(short) == 64


def test_a_deployment_may_have_the_scaled_context_and_no_more(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "intermediate_size": 16}
    write(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0}, **sizes)

    def plan(length: int) -> Planner:
        return Planner.from_config(make_config({"model": str(tmp_path), "max_model_len": length}))

    assert plan(131072).max_model_len == 131072
    with pytest.raises(ConfigError, match="131073; the model's context is 131072 tokens"):
        plan(131073)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "linear"}, "lacks the key factor"),
        ({"type": "dynamic", "factor": None}, "lacks the key factor"),
        ({"type": "linear", "factor": 0}, "factor is 0.*above 0"),
        ({"type": "yarn", "factor": 1e9}, "give a context of"),
        ({"type": "llama3", "factor": 8.0}, "lacks the key low_freq_factor"),
        ({**LONG, "short_factor": None}, "lacks the key short_factor"),
        ({**LONG, "long_factor": [1.0] * 3}, "long_factor has 3 numbers; a head has 4"),
        ({**LONG, "long_factor": [1.0, 1.0, 1.0, -1.0]}, "long_factor is .*numbers above 0"),
        ({"type": "yarn", "factor": 2, "original_max_position_embeddings": 1}, "an integer from 2"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_scaling_that_cannot_be_is_one_sentence(
    tmp_path: Path, scaling: dict[str, Any], words: str
) -> None:
    config = read(rope_scaling=scaling)

    with pytest.raises(ModelError, match=words):
        write(tmp_path, rope_scaling=scaling)
        read_model_facts(tmp_path)
        read_rope_spec(config, 8)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "mrope"}, "mrope is not supported"),
        ({"full_attention": {"rope_theta": 1.0}}, "types of layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_implemented_is_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_rope_spec(read(rope_parameters=scaling), 8)
