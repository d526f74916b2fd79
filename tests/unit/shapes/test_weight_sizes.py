"""The sizes of weights, which are computed from config.json, are compared with published numbers of
parameters.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.weight_sizes import WeightPart, weight_parts

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"


def total(parts: tuple[WeightPart, ...]) -> int:
    return sum(part.bytes for part in parts)


def elements(shape: str, **layout: int) -> int:
    spec = read_model_spec(SHAPES / shape)
    return total(weight_parts(spec, **{"tp": 1, "ep": 1, "element_bytes": 1} | layout))


def test_deepseek_v3_has_671_billion_parameters() -> None:
    assert round(elements("deepseek-v3") / 1e9) == 671


def test_its_next_token_module_has_14_billion_with_the_embedding_and_head_it_shares() -> None:
    # According to the model card on Hugging Face, there are 685B parameters: 671B of the main
    # model, and 14B of this module.
    spec = read_model_spec(SHAPES / "deepseek-v3")
    alone = elements("deepseek-v3", drafts=True) - elements("deepseek-v3")
    assert round((alone + 2 * spec.vocab_size * spec.hidden_size) / 1e9) in (13, 14)


def test_deepseek_v3_2_has_685_billion_with_its_module_as_the_hub_counts_them() -> None:
    spec = read_model_spec(SHAPES / "deepseek-v3.2")
    own = elements("deepseek-v3.2", drafts=True, element_bytes=4) / 4
    assert round((own + 2 * spec.vocab_size * spec.hidden_size) / 1e9) == 685


def test_qwen3_has_235_billion_parameters() -> None:
    assert round(elements("qwen3-235b-a22b") / 1e9) == 235


@pytest.mark.parametrize(
    ("shape", "billions", "tolerance"),
    # Numbers of parameters in billions, as the authors publish them. gpt-oss's model card has two
    # decimal places.
    [("glm-4.5", 355, 0.015), ("glm-4.5-air", 106, 0.015), ("minimax-m2", 230, 0.015),
     ("kimi-k2", 1040, 0.015), ("qwen3-next-80b-a3b", 80, 0.015),
     ("qwen3.5-397b-a17b", 397, 0.015), ("glm-5", 744, 0.015), ("deepseek-v3.2", 671, 0.015),
     ("gpt-oss-120b", 116.83, 5e-5), ("gpt-oss-20b", 20.91, 3e-4),
     ("kimi-linear-48b-a3b", 48, 0.025)],
)  # fmt: skip
def test_other_families_have_the_published_numbers_of_parameters(
    shape: str, billions: float, tolerance: float
) -> None:
    # All elements have four bytes here, so that elements that are always float32 count like all
    # other elements.
    assert elements(shape, element_bytes=4) / 4e9 == pytest.approx(billions, rel=tolerance)


# The published sizes of models, and their numbers of parameters in billions, as the authors publish
# them.
PUBLISHED = {
    "Mistral 7B v0.3": (7.248, {
        "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": None,
    }),
    "Mixtral 8x7B": (46.703, {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }),
    "Qwen1.5-MoE-A2.7B": (14.316, {
        "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "max_position_embeddings": 8192, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "Seed-OSS-36B": (36.151, {
        "architectures": ["SeedOssForCausalLM"], "vocab_size": 155136, "hidden_size": 5120,
        "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
    }),
    "Solar Open 100B": (102.6, {
        "architectures": ["SolarOpenForCausalLM"], "vocab_size": 196608, "hidden_size": 4096,
        "intermediate_size": 10240, "num_hidden_layers": 48, "num_attention_heads": 64,
        "max_position_embeddings": 131072, "n_routed_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
    }),
    "GLM-4-9B-0414": (9.4, {
        "architectures": ["Glm4ForCausalLM"], "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "attention_bias": True,
    }),
    "Phi-4": (14.66, {
        "architectures": ["Phi3ForCausalLM"], "vocab_size": 100352, "hidden_size": 5120,
        "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "max_position_embeddings": 16384,
    }),
    "Hy3": (295, {
        "architectures": ["HYV3ForCausalLM"], "vocab_size": 120832, "hidden_size": 4096,
        "intermediate_size": 13312, "num_hidden_layers": 80, "num_attention_heads": 64,
        "max_position_embeddings": 131072, "num_experts": 192, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    }),
    "ERNIE-4.5-0.3B": (0.36, {
        "architectures": ["Ernie4_5ForCausalLM"], "vocab_size": 103424, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
        "max_position_embeddings": 131072,
    }),
    "ERNIE-4.5-300B-A47B": (300, {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "vocab_size": 103424, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 54, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "moe_num_experts": 64,
        "moe_k": 8, "moe_num_shared_experts": 0, "moe_intermediate_size": 3584,
        "moe_layer_start_index": 3, "tie_word_embeddings": False,
    }),
    # Gemma's report counts the text model without the image encoder.
    "Gemma 3 1B": (1.0, {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }),
    "Gemma 3 27B": (1.416 + 25.6, {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "query_pre_attn_scalar": 168, "sliding_window": 1024,
        },
    }),
    "Ministral 3 14B": (13.5, {
        "architectures": ["Mistral3ForConditionalGeneration"], "text_config": {
            "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 16384,
            "num_hidden_layers": 40, "num_attention_heads": 32, "head_dim": 128,
            "max_position_embeddings": 262144,
        },
    }),
    "SmolLM3-3B": (3.075, {
        "architectures": ["SmolLM3ForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "max_position_embeddings": 65536,
    }),
    "OLMo 2 7B": (7.3, {
        "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100352, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    }),
    "Olmo 3 7B": (7.3, {
        "architectures": ["Olmo3ForCausalLM"], "vocab_size": 100278, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 65536,
    }),
    "EXAONE 4.0 32B": (32.0, {
        "architectures": ["Exaone4ForCausalLM"], "vocab_size": 102400, "hidden_size": 5120,
        "intermediate_size": 27392, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "sliding_window_pattern": "LLLG",
    }),
    "Command R": (34.98, {
        "architectures": ["CohereForCausalLM"], "vocab_size": 256000, "hidden_size": 8192,
        "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    }),
    "Command R+": (103.8, {
        "architectures": ["CohereForCausalLM"], "vocab_size": 256000, "hidden_size": 12288,
        "intermediate_size": 33792, "num_hidden_layers": 64, "num_attention_heads": 96,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_qk_norm": True,
    }),
    "Command R7B": (8.03, {
        "architectures": ["Cohere2ForCausalLM"], "vocab_size": 256000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 132096,
    }),
    "Granite 3.3 8B": (8.17, {
        "architectures": ["GraniteForCausalLM"], "vocab_size": 49159, "hidden_size": 4096,
        "intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }),
    "Granite 3.1 3B-A800M": (3.3, {
        "architectures": ["GraniteMoeForCausalLM"], "vocab_size": 49155, "hidden_size": 1536,
        "intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "num_local_experts": 40,
        "num_experts_per_tok": 8, "tie_word_embeddings": True,
    }),
    "Granite 4.0 Micro": (3.4, {
        "architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100352,
        "hidden_size": 2560, "intermediate_size": 8192, "shared_intermediate_size": 8192,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": ["attention"] * 40, "tie_word_embeddings": True,
    }),
    "MiniCPM-2B": (2.72, {
        "architectures": ["MiniCPMForCausalLM"], "vocab_size": 122753, "hidden_size": 2304,
        "intermediate_size": 5760, "num_hidden_layers": 40, "num_attention_heads": 36,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }),
    "Hunyuan-7B": (7.5, {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "vocab_size": 128167, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    }),
    "Hunyuan-A13B": (80.4, {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "vocab_size": 128167, "hidden_size": 4096,
        "intermediate_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32,
        "num_shared_expert": [1] * 32,
    }),
    "GLM-4.7-Flash": (30, {
        "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048,
        "intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "max_position_embeddings": 202752, "q_lora_rank": 768,
        "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
    }),
    "Ling-mini-2.0": (16.26, {
        "architectures": ["BailingMoeV2ForCausalLM"], "vocab_size": 157184, "hidden_size": 2048,
        "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768,
        "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
    }),
    "Apertus 8B": (8.05, {
        "architectures": ["ApertusForCausalLM"], "vocab_size": 131072, "hidden_size": 4096,
        "intermediate_size": 21504, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 65536,
    }),
    "AFM-4.5B": (4.62, {
        "architectures": ["ArceeForCausalLM"], "vocab_size": 128004, "hidden_size": 2560,
        "intermediate_size": 18432, "num_hidden_layers": 36, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 65536,
    }),
    "dots.llm1": (143, {
        "architectures": ["Dots1ForCausalLM"], "vocab_size": 152064, "hidden_size": 4096,
        "intermediate_size": 10944, "num_hidden_layers": 62, "num_attention_heads": 32,
        "max_position_embeddings": 32768, "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    }),
    "Qwen3-VL-30B-A3B": (30.53, {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "max_position_embeddings": 262144, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_families_have_the_published_numbers_of_parameters(tmp_path: Path, name: str) -> None:
    billions, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))

    found = total(weight_parts(read_model_spec(tmp_path), tp=1, ep=1, element_bytes=4))

    assert found / 4e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("shape", ["deepseek-v3", "qwen3-235b-a22b"])
def test_spreading_experts_or_splitting_them_costs_a_rank_the_same(shape: str) -> None:
    assert elements(shape, tp=8, ep=8) == elements(shape, tp=8)


def test_routers_are_float32_whatever_the_others_are() -> None:
    spec = read_model_spec(SHAPES / "deepseek-v3")
    routers = dict(weight_parts(spec, tp=8, ep=32, element_bytes=2))["routers"]
    assert routers == 58 * 256 * (7168 + 1) * 4  # + 1 for the bias in the choice of experts


def test_int8_halves_the_quantised_weights() -> None:
    spec = read_model_spec(SHAPES / "qwen3-235b-a22b")
    whole = dict(weight_parts(spec, tp=8, ep=8, element_bytes=2))
    halved = dict(weight_parts(spec, tp=8, ep=8, element_bytes=2, matrix_bytes=1))
    assert halved["experts"] * 2 == whole["experts"]
    assert halved["embedding and head"] == whole["embedding and head"]


def test_ranks_that_do_not_divide_the_vocabulary_hold_rows_of_padding() -> None:
    spec = read_model_spec(SHAPES / "deepseek-v3")
    odd = replace(spec, vocab_size=spec.vocab_size + 1)

    even, padded = (total(weight_parts(each, tp=4, ep=4, element_bytes=2)) for each in (spec, odd))

    assert padded - even == 2 * 2 * spec.hidden_size, "a row of the embedding and one of the head"


def test_a_rank_holds_its_share_of_experts_and_copies() -> None:
    spec = read_model_spec(SHAPES / "deepseek-v3")
    one = 58 * 3 * 7168 * 2048
    experts = [
        dict(weight_parts(spec, tp=1, ep=ep, element_bytes=1, redundant_experts=copies))["experts"]
        for ep, copies in ((256, 0), (320, 64), (288, 32), (72, 32))
    ]
    assert experts == [one, one, one, 4 * one]


def test_biases_of_dense_layers_are_counted(tmp_path: Path) -> None:
    shape = {**PUBLISHED["Seed-OSS-36B"][1], "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    spec = read_model_spec(tmp_path)

    found, without = (
        total(weight_parts(each, tp=4, ep=1, element_bytes=1))
        for each in (spec, replace(spec, has_mlp_bias=False))
    )

    assert found - without == 64 * (2 * 27648 // 4 + 5120)
