"""The demands of a configuration on its model, and the facts that are read about the model."""

from __future__ import annotations

import json
from contextlib import nullcontext
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
        ({"quantization": "fp8"}, "quantization is fp8; the quant_method .* is null"),
    ],
)
def test_settings_that_need_parts_that_a_model_lacks_are_refused(
    tmp_path: Path, sections: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(make_config({"model": "m", **sections}), read(tmp_path))


def test_quantization_may_name_the_method_of_the_checkpoint(tmp_path: Path) -> None:
    facts = read(tmp_path, quantization_config={"quant_method": "fp8"})

    check_model(make_config({"model": "m", "quantization": "fp8"}), facts)
    with pytest.raises(ConfigError, match=r"is compressed-tensors; the quant_method .* is fp8"):
        check_model(make_config({"model": "m", "quantization": "compressed-tensors"}), facts)


@pytest.mark.parametrize(
    ("tp", "keys", "into"),
    [
        (3, {}, "4 attention heads$"),
        (8, {"num_key_value_heads": 2}, "4 attention heads$"),
        (2, {"num_attention_heads": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "most 128"),
    ],
)
def test_heads_that_the_ranks_cannot_split_are_refused(
    tmp_path: Path, tp: int, keys: Any, into: str
) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.tp is {tp}: it must divide .*{into}"):
        check_model(make_config({"model": "m", "parallel": {"tp": tp}}), read(tmp_path, **keys))


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("parallel", "keys", "message"),
    [
        ({"tp": 4, "dcp": 4}, {"num_key_value_heads": 2},
         "dcp is 4; 2 ranks hold the same KV .*: set parallel.dcp to 1, or to 2$"),
        ({"tp": 2, "dcp": 2}, {"num_key_value_heads": 2},
         "dcp is 2; no two ranks hold the same KV .*: set parallel.dcp to 1$"),
        ({"tp": 4, "pcp": 2, "dcp": 8}, {"num_key_value_heads": 2},
         "dcp is 8; 4 ranks hold .* to 1, or to 2 or 4$"),
        ({"tp": 2, "pcp": 2, "dcp": 1}, {}, None),
        ({"tp": 2, "pcp": 2, "dcp": 4}, LATENT, None),
        ({"tp": 2, "pcp": 3, "dcp": 2}, LATENT, "dcp is 2; 6 ranks hold .* to 1, or to 3 or 6$"),
        ({"tp": 32, "dcp": 32}, {"num_attention_heads": 64, **LATENT},
         "dcp is 32; attention merges what up to 16 shards .* to 1, or to 2 or 4 or 8 or 16$"),
        ({"tp": 4, "dcp": 4}, {"num_attention_heads": 256, **LATENT},
         "dcp is 4; each rank would attend with the 256 heads of 4 ranks, .* up to 128: lower"),
    ],
)  # fmt: skip
def test_shards_are_refused_on_ranks_that_would_hold_no_copies(
    tmp_path: Path, parallel: Any, keys: Any, message: str | None
) -> None:
    config, facts = make_config({"model": "m", "parallel": parallel}), read(tmp_path, **keys)

    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_model(config, facts)


def test_settings_for_parts_that_a_model_has_are_accepted(tmp_path: Path) -> None:
    config = {"model": "m", "parallel": {"ep": 2, "dp": 2}, "speculative": {"num_tokens": 3}}

    facts = read(tmp_path, n_routed_experts=8, num_experts_per_tok=2, num_nextn_predict_layers=1)

    assert facts.num_draft_layers == 1
    check_model(make_config(config), facts)


def test_qwen3_next_has_a_next_token_module_unless_config_json_says_otherwise(
    tmp_path: Path,
) -> None:
    # the published config.json does not mention its next-token module
    published = {"architectures": ["Qwen3NextForCausalLM"]}

    assert read(tmp_path, **published).num_draft_layers == 1
    assert read(tmp_path, **published, num_nextn_predict_layers=0).num_draft_layers == 0
    assert read(tmp_path).num_draft_layers == 0
