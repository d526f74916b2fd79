"""The layers that have a sliding window, and the sizes of their windows, follow the rules of
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, UnsupportedModelError
from dist_aclgraph.shapes.model_facts import ModelFacts, check_model, read_model_facts

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "max_position_embeddings": 512,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(directory: Path, **keys: Any) -> ModelFacts:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **keys}))
    return read_model_facts(directory)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, [2, 3]),
        ({"max_window_layers": 0}, [0, 1, 2, 3]),
        ({"max_window_layers": 4}, []),
        ({"max_window_layers": None}, []),  # the default is 28; the model has fewer layers
        ({"use_sliding_window": False}, []),
        ({"sliding_window": None}, []),
        ({"layer_types": [SLIDING, FULL, SLIDING, FULL]}, [0, 2]),
        ({"layer_types": [FULL] * 4}, []),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, [0, 1, 2, 3]),
        ({"architectures": ["LlamaForCausalLM"]}, []),
        ({"architectures": ["MistralForCausalLM"]}, [0, 1, 2, 3]),
        ({"architectures": ["MistralForCausalLM"], "use_sliding_window": False}, [0, 1, 2, 3]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, []),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": [FULL, *[SLIDING] * 3]},
            [1, 2, 3],
        ),
        ({"architectures": ["MinistralForCausalLM"], "layer_types": [SLIDING, *[FULL] * 3]}, [0]),
        ({"architectures": ["MixtralForCausalLM"]}, [0, 1, 2, 3]),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 2}, [0, 2]),
        ({"architectures": ["Olmo3ForCausalLM"], "sliding_window_pattern": 2}, [0, 1, 2]),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_layers_slide_as_in_transformers(
    tmp_path: Path, keys: dict[str, Any], layers: list[int]
) -> None:
    window = read(tmp_path, **keys).window

    assert (sorted(window.layers) if window else []) == layers
    assert window is None or window.num_keys == 64


@pytest.mark.parametrize(
    ("architecture", "num_keys"),
    [("MistralForCausalLM", 4096), ("MinistralForCausalLM", 4096), ("MixtralForCausalLM", None)],
)
def test_an_absent_key_is_the_window_of_transformers(
    tmp_path: Path, architecture: str, num_keys: int | None
) -> None:
    absent = {key: value for key, value in SHAPE.items() if key != "sliding_window"}
    (tmp_path / "config.json").write_text(json.dumps(absent | {"architectures": [architecture]}))

    window = read_model_facts(tmp_path).window

    assert (window.num_keys if window else None) == num_keys


def test_a_window_that_holds_every_request_hides_nothing(tmp_path: Path) -> None:
    facts = read(tmp_path)

    assert facts.window_within(64) is None
    assert facts.window_within(65) is facts.window is not None


@pytest.mark.parametrize("parallel", [{"tp": 8, "dcp": 2}, {"tp": 2, "pcp": 2}])
def test_contexts_with_a_window_are_not_shared(tmp_path: Path, parallel: dict[str, int]) -> None:
    facts = read(tmp_path)

    check_model(make_config({"model": "m", "parallel": parallel, "max_model_len": 64}), facts)
    with pytest.raises(ConfigError, match="set both to 1, or max_model_len to 64 at most"):
        check_model(make_config({"model": "m", "parallel": parallel}), facts)


def test_an_unknown_type_of_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types has chunked_attention"):
        read(tmp_path, layer_types=["chunked_attention"] * 4)
