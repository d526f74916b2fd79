"""Names of keys of config.json, and defaults, that differ from one family to another."""

from __future__ import annotations

from typing import Any

# families whose published checkpoints have one next-token module, but no such key in config.json
HAS_DRAFTS = ("Qwen3NextForCausalLM",)
_GEMMA_NAMES = {"hidden_activation": "hidden_act"}
_COHERE_NAMES = {"layer_norm_eps": "rms_norm_eps"}
# for each family that names usual keys differently: its names, and the usual names
KEY_NAMES = {
    "InternLM3ForCausalLM": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    },
    "Gemma3ForCausalLM": _GEMMA_NAMES,
    "Gemma3ForConditionalGeneration": _GEMMA_NAMES,
    "CohereForCausalLM": _COHERE_NAMES,
    "Cohere2ForCausalLM": _COHERE_NAMES,
    "HunYuanMoEV1ForCausalLM": {
        "moe_topk": "num_experts_per_tok",
        "num_shared_expert": "n_shared_experts",
    },
    "BailingMoeV2ForCausalLM": {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "score_function": "scoring_func",
    },
    "HYV3ForCausalLM": {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    "KimiLinearForCausalLM": {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
}
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_QWEN2_VL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_QWEN3_NEXT = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "shared_expert_intermediate_size": 512,
}
_GLM4V = {"attention_bias": True, "rms_norm_eps": 1e-5, "num_key_value_heads": 2}
_HUNYUAN = {"rms_norm_eps": 1e-5}
_DEEPSEEK_V3 = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_GLM = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07}
_ERNIE = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
# If config.json lacks one of these keys, the family's value is used, as in transformers. Keys whose
# default is equal in all families are not listed.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 128},
    "DeepseekV2ForCausalLM": {"n_shared_experts": 2},
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "KimiK25ForConditionalGeneration": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": {
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    },
    "DeepseekV32ForCausalLM": _DEEPSEEK_V3,
    "GlmMoeDsaForCausalLM": {**_DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    "Glm4MoeForCausalLM": {
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
    },
    "KimiLinearForCausalLM": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
    },
    "MiniMaxM2ForCausalLM": {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
    "GptOssForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
    },
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4},
    "InternLM3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    "IQuestCoderForCausalLM": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    "SeedOssForCausalLM": {"num_key_value_heads": 8, "head_dim": 128},
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "SolarOpenForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_shared_experts": 1,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    "HYV3ForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.826,
        "rope_theta": 11158840.0,
        "rms_norm_eps": 1e-5,
    },
    "Ernie4_5ForCausalLM": {"num_key_value_heads": 2, "head_dim": 128, **_ERNIE},
    "Ernie4_5_MoeForCausalLM": {"num_key_value_heads": 4, "n_shared_experts": 2, **_ERNIE},
    "Qwen3VLForConditionalGeneration": {"head_dim": 128, "rope_theta": 5e5},
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Mistral3ForConditionalGeneration": {"num_key_value_heads": 8},
    "MinistralForCausalLM": {"num_key_value_heads": 8},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": {"num_key_value_heads": 4, "head_dim": 256},
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": {"num_key_value_heads": 4, "head_dim": 256},
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_NEXT,
    "Qwen3VLMoeForConditionalGeneration": {"num_key_value_heads": 16, "rope_theta": 5e5},
    "Ministral3ForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "SmolLM3ForCausalLM": {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    "ArceeForCausalLM": {"rms_norm_eps": 1e-5},
    "ApertusForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.2e7,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1.2e7,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5},
    "YoutuForCausalLM": {"tie_word_embeddings": True},
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": {
        **_GLM4V,
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "Exaone4ForCausalLM": {"rms_norm_eps": 1e-5},
    "CohereForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "Cohere2ForCausalLM": {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": _HUNYUAN,
    "Dots1ForCausalLM": {
        "num_key_value_heads": 32,
        "norm_topk_prob": False,
        "max_window_layers": 62,
    },
    "GraniteMoeHybridForCausalLM": {"shared_intermediate_size": 1024},
}
