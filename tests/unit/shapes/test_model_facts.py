"""What a configuration wants of its model, and what the model has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.model_facts import ModelFacts, check_model, read_model_facts

SHAPE = {"architectures": ["AForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
         "hidden_size": 64}  # fmt: skip


def read(directory: Path, **keys: Any) -> ModelFacts:
    (directory / "config.json").write_text(json.dumps({**SHAPE, **keys}))
    return read_model_facts(directory)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"ep": 2, "dp": 2}}, "parallel.ep is 2; AForCausalLM has no experts"),
        ({"speculative": {"num_tokens": 1}}, "AForCausalLM has no next-token modules"),
        ({"dtype": "float32", "quantization": "w8a8"}, "float32 and quantization is w8a8"),
    ],
)
def test_what_a_model_lacks_is_refused(tmp_path: Path, sections: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(make_config({"model": "m", **sections}), read(tmp_path))


@pytest.mark.parametrize(
    ("tp", "keys", "into"),
    [
        (3, {}, "4 attention heads$"),
        (8, {"num_key_value_heads": 2}, "4 attention heads$"),
        (2, {"num_attention_heads": 12, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "powers of"),
    ],
)
def test_heads_that_the_ranks_cannot_split_are_refused(
    tmp_path: Path, tp: int, keys: Any, into: str
) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.tp is {tp}: it must divide .*{into}"):
        check_model(make_config({"model": "m", "parallel": {"tp": tp}}), read(tmp_path, **keys))


def test_what_a_model_has_is_taken(tmp_path: Path) -> None:
    config = {"model": "m", "parallel": {"ep": 2, "dp": 2}, "speculative": {"num_tokens": 3}}

    facts = read(tmp_path, n_routed_experts=8, num_experts_per_tok=2, num_nextn_predict_layers=1)

    assert facts.num_draft_layers == 1
    check_model(make_config(config), facts)
