"""The values that are read from config.json are compared with DeepSeek's published values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.model_facts import ModelFacts, read_model_facts
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec
from dist_aclgraph.shapes.rope_spec import RopeSpec

# The published config.json without quantization_config, as in a checkpoint that was converted to
# bfloat16.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def read(directory: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_model_spec(directory)


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)

    assert spec.num_draft_layers == 1
    assert spec.latent == LatentSpec(
        q_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128, interleaves=True
    )
    assert spec.experts == ExpertSpec(
        num_experts=256, top_k=8, width=2048, renormalizes=True, layers=frozenset(range(3, 62)),
        scoring="sigmoid", num_groups=8, top_groups=4, group_score="top2", scaling=2.5,
        num_shared=1, has_bias=True,
    )  # fmt: skip
    assert spec.rope == RopeSpec(
        theta=10000.0, kind="yarn", max_position_embeddings=163840, factor=40.0,
        original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=1.0,
    )  # fmt: skip


def test_deepseek_v2_lite_as_published(tmp_path: Path) -> None:
    spec = read(tmp_path, V2_LITE)

    assert spec.num_draft_layers == 0
    assert spec.latent == LatentSpec(
        q_rank=None, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128, interleaves=True
    )
    assert spec.experts == ExpertSpec(
        num_experts=64, top_k=6, width=1408, renormalizes=False, layers=frozenset(range(1, 27)),
        scoring="softmax", num_groups=1, top_groups=1, group_score="max", scaling=1.0,
        num_shared=2, has_bias=False,
    )  # fmt: skip
    assert spec.rope.mscale_all_dim == 0.707


def test_groups_of_deepseek_v2(tmp_path: Path) -> None:
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    experts = read(tmp_path, V2_LITE, **groups, routed_scaling_factor=16.0).experts

    assert experts is not None
    assert (experts.num_groups, experts.top_groups, experts.group_score) == (8, 3, "max")
    assert experts.scaling == 16.0


def test_the_newer_names_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = dict(V3["rope_scaling"])
    newer = {"rope_type": scaling.pop("type"), "rope_theta": 10000, **scaling}
    config = {key: value for key, value in V3.items() if not key.startswith("rope_")}

    assert read(tmp_path, config, rope_parameters=newer).rope == read(tmp_path, V3).rope


def test_only_a_model_without_dense_layers_needs_no_width_of_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks the key intermediate_size"):
        read(tmp_path, V3, intermediate_size=None)

    assert read(tmp_path, V3, intermediate_size=None, first_k_dense_replace=0).experts is not None


def test_every_second_layer_may_have_experts(tmp_path: Path) -> None:
    experts = read(tmp_path, V3, moe_layer_freq=2).experts

    assert experts is not None
    assert sorted(experts.layers) == list(range(4, 62, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_lora_rank": 256}, "256, 128, 64, 128; the attention operators take 512, 128, 64"),
        ({"scoring_func": "softmax"}, "softmax scores and noaux_tc"),
        ({"topk_method": "greedy"}, "sigmoid scores and greedy"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 128}, "groups of 2 experts are not supported"),
    ],
)
def test_what_is_not_implemented_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence) as caught:
        read(tmp_path, V3, **changes)

    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_a_spec_holds_the_facts_that_planning_knows(tmp_path: Path) -> None:
    spec = read(tmp_path, V3)
    facts = read_model_facts(tmp_path)

    assert isinstance(spec, ModelFacts)
    shared = {field.name for field in dataclasses.fields(facts)} - {"experts"}
    assert all(getattr(spec, name) == getattr(facts, name) for name in shared)
    assert spec.experts is not None and facts.experts is not None
    assert spec.experts.num_experts == facts.experts.num_experts


def test_planning_knows_the_size_of_the_latent(tmp_path: Path) -> None:
    read(tmp_path, V3)

    facts = read_model_facts(tmp_path)

    assert facts.mla
    assert facts.latent_size == 576


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 7}, "7 groups among 256 experts"),
        ({"topk_group": 9}, "9 of 8 groups"),
        ({"num_experts_per_tok": 129}, "129 experts of a token; 128 may be chosen"),
    ],
)
def test_experts_that_no_router_can_choose_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path, V3, **changes)
