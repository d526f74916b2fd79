"""The layers without a rotary embedding are the same as in the configurations of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Cohere2Config, Exaone4Config, SmolLM3Config

from dist_aclgraph.shapes.families import read_model_spec

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}


def without_rotation(config: Any) -> set[int]:
    """Return the layers without a rotation in transformers' attention."""
    if isinstance(config, SmolLM3Config):  # no_rope_layers has 1 for each layer with a rotation
        return {i for i, rotates in enumerate(config.no_rope_layers) if not rotates}
    return {i for i, kind in enumerate(config.layer_types) if kind == "full_attention"}


@pytest.mark.parametrize(
    "config",
    [
        SmolLM3Config(num_hidden_layers=9, num_key_value_heads=2, **SIZES),
        SmolLM3Config(num_hidden_layers=6, no_rope_layer_interval=3, **SIZES),
        SmolLM3Config(num_hidden_layers=4, no_rope_layers=[0, 1, 1, 0], **SIZES),
        Cohere2Config(num_hidden_layers=9, sliding_window=16, **SIZES),
        Exaone4Config(num_hidden_layers=9, sliding_window=16, **SIZES),
    ],
    ids=lambda config: f"{config.model_type}-{config.num_hidden_layers}",
)
def test_some_layers_rotate_nothing_as_in_transformers(tmp_path: Path, config: Any) -> None:
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(tmp_path)

    spec = read_model_spec(tmp_path)

    assert spec.other_rope is not None
    assert spec.other_rope.layers == without_rotation(config) != set()
