"""A deployment's configuration can replace values of the model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, load_config, load_with_options, make_config, to_yaml
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.rope_spec import read_rope_spec, read_rotary_dim
from dist_aclgraph.shapes.servable import read_servable_spec
from dist_aclgraph.text.tokenizer import Tokenizer

MODEL = "models/tiny-qwen3"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SHAPE = {"architectures": ["A"], "max_position_embeddings": 4096}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PARAMETERS = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


def read(config: Config) -> dict[str, Any]:
    """Return values of the model as every process of a deployment reads them."""
    spec = read_servable_spec(config)
    return {
        "plan": Planner.from_config(config).max_model_len,
        "worker": (spec.max_model_len(config), spec.rope.kind, spec.rope.factor),
        "ingress": Tokenizer(config.model, config.model_overrides).context_len,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rope_scaling": YARN}},
        {"rope_scaling": YARN},
        {"hf_overrides": {"vocab_size": 419}, "rope_scaling": YARN, "rope_theta": 1e6},
    ],
)
def test_all_processes_read_the_overrides(options: dict[str, Any]) -> None:
    config = load_with_options(MODEL, options)

    assert read(config) == {"plan": 8192, "worker": (8192, "yarn", 4.0), "ingress": 8192}


def test_one_key_of_an_override_may_be_set(tmp_path: Path) -> None:
    given = {"rope_scaling": YARN}
    config = load_with_options(
        MODEL, {"hf_overrides": given}, {"model_overrides.rope_scaling.factor": 2.0}
    )
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(config))

    assert read(config)["ingress"] == 4096
    assert load_config(saved) == config
    assert given == {"rope_scaling": YARN} and YARN["factor"] == 4.0


def test_an_override_replaces_a_value_of_the_text_part(tmp_path: Path) -> None:
    text = {"hidden_size": 8, "eos_token_id": 1, "layer_types": ["a"]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], "text_config": text}))
    overrides = {
        "eos_token_id": [3],
        "layer_types": ["b", "c"],
        "text_config": {"hidden_size": 16},
    }
    config = make_config({"model": "m", "model_overrides": overrides})

    found = read_model_config(tmp_path, config.model_overrides)

    assert found.architecture == "A" and found.eos_token_ids == (3,)
    assert found.texts("layer_types") == ("b", "c") and found.integer("hidden_size") == 16


@pytest.mark.parametrize("value", [3, ["a"], {"a": object()}])
def test_an_override_that_is_no_json_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="model_overrides"):
        make_config({"model": "m", "model_overrides": value})


@pytest.mark.parametrize(
    ("file", "overrides", "rope"),
    [
        ({"rope_parameters": PARAMETERS}, {"rope_theta": 5e6}, (5e6, "default", 4096, 8)),
        ({"rope_parameters": PARAMETERS}, {"rope_scaling": YARN}, (1e6, "yarn", 2048, 8)),
        ({"rope_parameters": PARAMETERS}, {"rope_scaling": None}, (1e6, "default", 4096, 8)),
        (
            {"rope_parameters": PARAMETERS},
            {"rope_scaling": YARN, "rope_theta": 5e6},
            (5e6, "yarn", 2048, 8),
        ),
        (
            {"rope_parameters": PARAMETERS},
            {"partial_rotary_factor": 0.25},
            (1e6, "default", 4096, 4),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": LINEAR},
            {"rope_parameters": {**YARN, "rope_theta": 5e6}},
            (5e6, "yarn", 2048, 16),
        ),
        ({"rope_theta": 1e6, "rope_scaling": LINEAR}, {"rope_theta": 5}, (5, "linear", 4096, 16)),
        ({"rope_theta": 1e6, "rope_scaling": LINEAR}, {"a": 1}, (1e6, "linear", 4096, 16)),
        ({"rope_theta": 1e6}, {"rope_scaling": YARN}, (1e6, "yarn", 2048, 16)),
        (
            {"original_max_position_embeddings": 8},
            {"rope_scaling": YARN},
            (10000.0, "yarn", 2048, 16),
        ),
        (
            {"text_config": {"rope_parameters": PARAMETERS}},
            {"text_config": {"rope_theta": 5e6}},
            (5e6, "default", 4096, 8),
        ),
    ],
)
def test_an_override_of_the_rotary_embedding_precedes_all_places_of_the_file(
    tmp_path: Path, file: dict[str, Any], overrides: dict[str, Any], rope: tuple[Any, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **file}))

    config = read_model_config(tmp_path, overrides)

    spec = read_rope_spec(config, 16, rotates_part=True)
    dim = read_rotary_dim(config, 16, usual_part=1.0)
    assert (spec.theta, spec.kind, spec.original_len, dim) == rope
