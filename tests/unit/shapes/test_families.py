"""The values that are read from published config.json files of families other than DeepSeek."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, SwigluClip
from dist_aclgraph.shapes.servable import read_servable_spec

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"


def read(directory: Path, shape: str, **changes: Any) -> ModelSpec:
    config = json.loads((SHAPES / shape / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return read_model_spec(directory)


@pytest.mark.parametrize(
    ("shape", "defaults"),
    [
        ("deepseek-v3", {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}),
        ("deepseek-v3", {"n_shared_experts": 1, "first_k_dense_replace": 3}),
        ("kimi-k2", {"routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}),
        ("deepseek-v3.2", {"routed_scaling_factor": 2.5, "n_group": 8, "rope_theta": 10000.0}),
        ("glm-5", {"routed_scaling_factor": 2.5, "n_group": 1, "rms_norm_eps": 1e-5}),
        ("glm-4.5", {"rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1}),
        ("kimi-linear-48b-a3b", {"routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5}),
        ("kimi-linear-48b-a3b", {"num_shared_experts": 1}),
        ("minimax-m2", {"rope_theta": 5e6, "rms_norm_eps": 1e-6}),
        ("gpt-oss-20b", {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "head_dim": 64}),
        ("qwen3-next-80b-a3b", {"head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}),
        ("qwen3.5-397b-a17b", {"head_dim": 256, "rms_norm_eps": 1e-6}),
        ("glm-4.5", {"num_key_value_heads": 8}),
        ("minimax-m2", {"num_key_value_heads": 8}),
        ("gpt-oss-20b", {"num_key_value_heads": 8}),
        ("qwen3-235b-a22b", {"num_key_value_heads": 4}),
        ("qwen3-next-80b-a3b", {"num_key_value_heads": 2}),
        ("qwen3.5-397b-a17b", {"num_key_value_heads": 2}),
    ],
)
def test_a_key_that_is_absent_has_the_default_of_transformers(
    tmp_path: Path, shape: str, defaults: dict[str, Any]
) -> None:
    config = json.loads((SHAPES / shape / "config.json").read_text())
    config |= config.pop("text_config", {}) | {"architectures": config["architectures"]}
    (tmp_path / "config.json").write_text(json.dumps(config | defaults))
    stated = read_model_spec(tmp_path)
    absent = {key: value for key, value in config.items() if key not in defaults}
    (tmp_path / "config.json").write_text(json.dumps(absent))

    assert read_model_spec(tmp_path) == stated


def test_glm_4_5_as_published() -> None:
    spec = read_model_spec(SHAPES / "glm-4.5")

    assert (spec.head_dim, spec.rotary_dim, spec.rope.theta) == (128, 64, 1e6)
    assert (spec.has_qkv_bias, spec.has_output_bias, spec.has_qk_norm) == (True, False, True)
    assert spec.num_draft_layers == 1
    assert spec.experts == ExpertSpec(
        num_experts=160, top_k=8, width=1536, renormalizes=True, layers=frozenset(range(3, 93)),
        scoring="sigmoid", group_score="top2", scaling=2.5, num_shared=1, has_bias=True,
    )  # fmt: skip
    assert not read_model_spec(SHAPES / "glm-4.5-air").has_qk_norm


def test_minimax_m2_as_published() -> None:
    spec = read_model_spec(SHAPES / "minimax-m2")

    assert (spec.rotary_dim, spec.has_qk_norm, spec.qk_norm_spans_heads) == (64, True, True)
    assert spec.num_draft_layers == 0, "no weights of the modules of use_mtp are published"
    assert spec.experts == ExpertSpec(
        num_experts=256, top_k=8, width=1536, renormalizes=True, layers=frozenset(range(62)),
        scoring="sigmoid", group_score="top2", has_bias=True,
    )  # fmt: skip


def test_gpt_oss_as_published() -> None:
    spec = read_model_spec(SHAPES / "gpt-oss-120b")

    assert (spec.has_sinks, spec.has_qkv_bias, spec.has_output_bias) == (True, True, True)
    assert (spec.rope.kind, spec.rope.truncate, spec.rotary_dim) == ("yarn", False, None)
    assert spec.window is not None
    assert (spec.window.num_keys, spec.window.layers) == (128, frozenset(range(0, 36, 2)))
    assert spec.experts == ExpertSpec(
        num_experts=128, top_k=4, width=2880, renormalizes=True, layers=frozenset(range(36)),
        has_product_biases=True, clip=SwigluClip(1.702, 7.0), is_stacked=True,
    )  # fmt: skip


def test_layers_of_gpt_oss_alternate_unless_config_json_lists_them(tmp_path: Path) -> None:
    unlisted = read(tmp_path, "gpt-oss-20b", layer_types=None)
    full = read(tmp_path, "gpt-oss-20b", layer_types=["full_attention"] * 24)
    without = read(tmp_path, "gpt-oss-20b", sliding_window=None)

    assert unlisted.window is not None
    assert sorted(unlisted.window.layers) == list(range(0, 24, 2))
    assert full.window is None
    assert without.window is None


def test_kimi_linear_as_published() -> None:
    spec = read_model_spec(SHAPES / "kimi-linear-48b-a3b")

    assert spec.linear is not None and spec.latent is not None
    assert [i for i in range(27) if spec.kind_of(i) == "latent"] == [3, 7, 11, 15, 19, 23, 26]
    assert (spec.linear.num_value_heads, spec.linear.decays_by_channel) == (32, True)
    assert (spec.latent.q_rank, spec.rope.kind, spec.context_len) == (None, "none", 1 << 20)
    assert spec.num_draft_layers == 0
    assert spec.experts == ExpertSpec(
        num_experts=256, top_k=8, width=1024, renormalizes=True, layers=frozenset(range(1, 27)),
        scoring="sigmoid", group_score="top2", scaling=2.446, num_shared=1, has_bias=True,
    )  # fmt: skip


def test_names_of_kimi_linear() -> None:
    names = read_model_spec(SHAPES / "kimi-linear-48b-a3b").names
    stored = [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        "model.layers.1.block_sparse_moe.experts.7.w2.weight",
    ]
    usual = [name.replace("block_sparse_moe", "mlp").replace("w2", "down_proj") for name in stored]

    assert [names.stored(name) for name in usual] == stored


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ModelError, "kda_layers and full_attn_layers must name each of the layers 1 to 27 once",
         {"linear_attn_config": {"kda_layers": list(range(27)), "full_attn_layers": []}}),
        (UnsupportedModelError, "every layer has linear attention",
         {"linear_attn_config": {"kda_layers": list(range(1, 28)), "full_attn_layers": [],
                                 "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}}),
        (UnsupportedModelError, "mla_use_nope is false", {"mla_use_nope": False}),
        (UnsupportedModelError, "linear_attn_config is missing", {"linear_attn_config": None}),
        (UnsupportedModelError, "experts chosen by softmax scores",
         {"moe_router_activation_func": "softmax"}),
    ],
)  # fmt: skip
def test_variants_of_kimi_linear_are_refused(
    tmp_path: Path, error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, "kimi-linear-48b-a3b", **changes)


def test_kimi_k2_is_a_deepseek_v3() -> None:
    spec = read_model_spec(SHAPES / "kimi-k2")

    assert spec.latent is not None and spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.num_groups, spec.experts.scaling) == (
        384, 1, 2.827,
    )  # fmt: skip
    assert spec.num_draft_layers == 0


def test_kimi_k2_5_is_a_kimi_k2_with_other_names(tmp_path: Path) -> None:
    text = json.loads((SHAPES / "kimi-k2" / "config.json").read_text())
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))

    spec = read_model_spec(tmp_path)

    assert spec.experts == read_model_spec(SHAPES / "kimi-k2").experts
    assert spec.names.stored("lm_head.weight") == "language_model.lm_head.weight"
    assert spec.names.stored("model.norm.weight") == "language_model.model.norm.weight"


def test_kimi_k2_5_has_experts_of_four_bits_as_kimi_k2_thinking(tmp_path: Path) -> None:
    text = json.loads((SHAPES / "kimi-k2-thinking" / "config.json").read_text())
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    matrices = read_model_spec(tmp_path).int4

    assert matrices == read_model_spec(SHAPES / "kimi-k2-thinking").int4
    assert {(matrix.part, matrix.form.group) for matrix in matrices} == {("experts", 32)}


def test_names_of_minimax_m2() -> None:
    names = read_model_spec(SHAPES / "minimax-m2").names
    moe = "model.layers.3.block_sparse_moe"

    assert [
        names.stored(f"model.layers.3.mlp.{name}")
        for name in ("gate.weight", "gate.e_score_correction_bias", "experts.7.gate_proj.weight",
                     "experts.7.up_proj.weight_scale_inv", "experts.7.down_proj.weight")
    ] == [f"{moe}.gate.weight", f"{moe}.e_score_correction_bias", f"{moe}.experts.7.w1.weight",
          f"{moe}.experts.7.w3.weight_scale_inv", f"{moe}.experts.7.w2.weight"]  # fmt: skip
    attention = "model.layers.3.self_attn.o_proj.weight"
    assert names.stored(attention) == attention


@pytest.mark.parametrize(
    ("shape", "changes", "sentence"),
    [
        ("minimax-m2", {"qk_norm_type": "per_head"}, "qk_norm_type per_head is not supported"),
        ("minimax-m2", {"use_qk_norm": False}, "use_qk_norm is false"),
        ("minimax-m2", {"use_routing_bias": False}, "use_routing_bias is false"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        ("minimax-m2", {"attn_type_list": [0, 1]}, "attn_type_list has layers of linear"),
        ("minimax-m2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "layer_types has linear"),
        (
            "glm-4.5",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quant_method 'mxfp4'; supported: .*mxfp4 of gpt-oss",
        ),
        ("qwen3-235b-a22b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_implemented_is_refused(
    tmp_path: Path, shape: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence):
        read(tmp_path, shape, **changes)


SMALL = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("GemmaForCausalLM", {}, "supported ones, such as Gemma3ForCausalLM"),
        ("Gemma2ForCausalLM", {}, "limits scores of attention by tanh"),
        ("Mistral4ForCausalLM", {}, "latents have 256 elements"),
        ("Llama4ForCausalLM", {}, "attend within chunks of 8192 tokens"),
        ("LongcatFlashForCausalLM", {}, "two latent attentions"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "silu is not supported; only relu2"),
        ("LlamaForCausalLM", {"hidden_act": "relu2"}, "hidden_act relu2 is not supported"),
        ("MiMoForCausalLM", {"use_sliding_window": True}, "this family has no windows here"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8; limits of queries"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "softcapping is 30; limits of"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "see earlier ones only"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "hidden_act gelu is not supported"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "this family has no windows here"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "2 items; each of 4 layers needs one"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LGLG"}, "is LGLG; only the last"),
        ("GraniteMoeHybridForCausalLM", {"layers_block_type": ["mamba"] * 4}, "of Mamba"),
        ("MiniCPMForCausalLM", {"num_experts": 8}, "num_experts is given"),
        ("BailingMoeV2ForCausalLM", {"use_qk_norm": False}, "only models with use_qk_norm"),
        ("BailingMoeV2ForCausalLM", {"norm_head": True}, "normalised weights of heads"),
        ("Mistral3ForConditionalGeneration", {"kv_lora_rank": 256}, "kv_lora_rank is 256; latent"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "layers that share keys"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "only models with use_qk_norm"),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 8, "moe_topk": [1, 2, 1, 1]},
         r"num_experts_per_tok lists \[1, 2\]; only one value"),
        ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 8, "moe_k": 1, "moe_intermediate_size": 8,
                                     "hidden_act": "gelu_pytorch_tanh"}, "beside experts"),
        ("Qwen3_5ForCausalLM", {
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "hidden_act": "gelu_pytorch_tanh"}, "tanh is not supported beside linear attention"),
    ],
)  # fmt: skip
def test_variants_of_more_families_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], sentence: str
) -> None:
    config = SMALL | {"architectures": [architecture]} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModelError, match=sentence):
        read_model_spec(tmp_path)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, **EXPERTS,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1.2e7, "factor": 8.0}
GROWING = {"factor": 16.0, "rope_theta": 1e6, "original_max_position_embeddings": 16384}


@pytest.mark.parametrize(
    ("architecture", "others", "defaults"),
    [
        ("GptOssForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2},
         {"rope_parameters": {**YARN, "truncate": False}}),
        ("ApertusForCausalLM", {}, {"rope_parameters": {
            **LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": 8192}}),
        ("Ministral3ForCausalLM", {}, {"rope_parameters": {
            **YARN, **GROWING, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
        ("GraniteMoeSharedForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2},
         {"shared_intermediate_size": 0}),
        ("Qwen3NextForCausalLM", LINEAR, {"shared_expert_intermediate_size": 512}),
        ("Qwen3_5MoeForCausalLM", LINEAR, {"shared_expert_intermediate_size": 512}),
        ("Qwen2VLForConditionalGeneration", {"num_attention_heads": 8},
         {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    ],
)  # fmt: skip
def test_an_absent_key_of_a_small_model_has_the_default_of_transformers(
    tmp_path: Path, architecture: str, others: dict[str, Any], defaults: dict[str, Any]
) -> None:
    config = SMALL | {"architectures": [architecture]} | others
    if "num_key_value_heads" in defaults:
        del config["num_key_value_heads"]
    specs = []
    for keys in (defaults, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | keys))
        specs.append(read_model_spec(tmp_path))

    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    ("architecture", "changes", "rotated"),
    [
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "rope"}, [0, 1, 2, 3]),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": "nope"}, []),
        ("GraniteMoeHybridForCausalLM", {"position_embedding_type": None}, []),
        ("GraniteMoeHybridForCausalLM", {}, []),
        ("Exaone4ForCausalLM", {"sliding_window": 16}, [0, 1, 2]),
        ("Exaone4ForCausalLM", {"layer_types": ["full_attention"] * 4}, []),
        ("Exaone4ForCausalLM", {"sliding_window": None}, [0, 1, 2, 3]),
    ],
)
def test_layers_rotate_as_in_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, Any], rotated: list[int]
) -> None:
    config = SMALL | {"architectures": [architecture]} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))

    other = read_model_spec(tmp_path).other_rope

    assert [i for i in range(4) if not other or i not in other.layers] == rotated


@pytest.mark.parametrize("kinds", [["dense"] * 4, ["dense", "sparse", "dense", "dense"]])
def test_a_list_may_give_experts_to_no_layer(tmp_path: Path, kinds: list[str]) -> None:
    config = SMALL | {
        "architectures": ["HYV3ForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "mlp_layer_types": kinds,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    experts = read_model_spec(tmp_path).experts

    assert experts is not None
    assert sorted(experts.layers) == [i for i in range(4) if kinds[i] == "sparse"]


@pytest.mark.parametrize("order", [1, -1])
def test_the_name_that_a_family_gives_to_a_key_has_priority(tmp_path: Path, order: int) -> None:
    keys = {"layer_norm_eps": 1e-3, "rms_norm_eps": 1e-5}
    config = SMALL | {"architectures": ["CohereForCausalLM"]} | dict([*keys.items()][::order])
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_model_spec(tmp_path).rms_norm_eps == 1e-3


def test_dots_llm1_is_read_as_published(tmp_path: Path) -> None:
    """In the published file, ``scoring_func`` has a value that belongs to ``topk_method``."""
    config = SMALL | {
        "architectures": ["Dots1ForCausalLM"], "scoring_func": "noaux_tc", "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    experts = read_model_spec(tmp_path).experts

    assert experts is not None
    assert (experts.scoring, experts.has_bias, experts.renormalizes) == ("sigmoid", True, True)


def test_older_keys_of_gemma_3_are_those_of_newer_files(tmp_path: Path) -> None:
    """Published files have older keys. transformers 5 saves rotary parameters per layer type."""
    pattern = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}
    older = {
        "rope_theta": 1e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    newer = {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    specs = []
    for keys in (older, newer):
        config = SMALL | {"num_hidden_layers": 6} | pattern | keys
        (tmp_path / "config.json").write_text(json.dumps(config))
        specs.append(read_model_spec(tmp_path))

    assert specs[0] == specs[1]
    assert (specs[0].rope.kind, specs[0].rope.factor) == ("linear", 8.0)
    assert specs[0].other_rope is not None and specs[0].window is not None
    assert specs[0].other_rope.layers == specs[0].window.layers == {0, 1, 3, 4}
    assert (specs[0].context_len, specs[0].other_rope.rope.theta) == (64, 2e4)
    for override in ("rope_scaling", "rope_parameters"):
        changes = {override: {"rope_type": "linear", "factor": 2.0}}
        changed = read_model_spec(tmp_path, changes)
        assert (changed.rope.factor, changed.rope.theta) == (2.0, 1e6)
        assert changed.other_rope == specs[0].other_rope


def test_joined_matrices_in_fp8_are_refused(tmp_path: Path) -> None:
    blocks = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {
        "architectures": ["Glm4ForCausalLM"], "vocab_size": 64, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 64, "quantization_config": {"quant_method": "fp8", **blocks},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModelError, match=r"several matrices as one.* in fp8"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5, 0.01, 0.04])
def test_an_impossible_part_of_a_head_is_refused(tmp_path: Path, part: float) -> None:
    with pytest.raises(ModelError, match="must select an even number of the 128 elements"):
        read(tmp_path, "glm-4.5", partial_rotary_factor=part)


def test_the_rotated_part_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    within = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}

    assert read(tmp_path, "glm-4.5", rope_parameters=within).rotary_dim == 32
    assert read(tmp_path, "glm-4.5", partial_rotary_factor=None).rotary_dim == 64
    assert read(tmp_path, "minimax-m2", rotary_dim=None).rotary_dim == 128
    assert read(tmp_path, "minimax-m2", partial_rotary_factor=0.25).rotary_dim == 32


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"parallel": {"tp": 2, "pcp": 2}, "max_model_len": 64},
            "parallel.pcp 2; contexts of heads with sinks, which GptOssForCausalLM has",
        ),
        ({"quantization": "w8a8"}, "quantization is w8a8; experts with biases"),
    ],
)
def test_gpt_oss_is_refused_where_it_cannot_be_served(keys: dict[str, Any], sentence: str) -> None:
    model = str(SHAPES / "gpt-oss-20b")

    assert read_servable_spec(make_config({"model": model})).has_sinks
    with pytest.raises(ConfigError, match=sentence):
        read_servable_spec(make_config({"model": model, **keys}))


@pytest.mark.parametrize("architecture", ["HYV3ForCausalLM", "Ernie4_5_MoeForCausalLM"])
def test_next_token_modules_that_are_not_loaded_propose_no_drafts(
    tmp_path: Path, architecture: str
) -> None:
    shape = {
        "architectures": [architecture], "num_nextn_predict_layers": 1, "num_hidden_layers": 2,
        "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64,
        "max_position_embeddings": 512, "num_experts": 4, "moe_num_experts": 4, "moe_k": 2,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = make_config({"model": str(tmp_path), "speculative": {"num_tokens": 1}})

    with pytest.raises(ConfigError, match=f"{architecture} has no next-token modules"):
        read_servable_spec(config)


@pytest.mark.parametrize(
    ("whole", "text", "is_tied"),
    [(False, True, False), (True, False, True), (None, True, True), (None, None, False)],
)
def test_the_whole_model_decides_about_a_tied_head(
    tmp_path: Path, whole: bool | None, text: bool | None, is_tied: bool
) -> None:
    inner = {
        "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    shape = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": whole,
        "text_config": inner | {"tie_word_embeddings": text},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))

    assert read_model_spec(tmp_path).tie_word_embeddings is is_tied
