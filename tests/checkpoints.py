"""Small checkpoints with random weights, and the tokens that transformers generates from them.

The emulator must be loaded before transformers (fixture ``npu``), because transformers imports
torch_npu.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dist_aclgraph.shapes.families import read_model_spec

VOCAB = 503  # a prime number, so that ranks cannot divide the vocabulary into equal parts
MAX_LEN = 512

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
DEEPSEEK_ROPE = {
    **YARN_ROPE,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "rope_parameters": DEEPSEEK_ROPE,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
}

# Sizes of all small models; SPECIAL adds the settings of each architecture.
USUAL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 194,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "eos_token_id": None,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 64, "rope_parameters": LINEAR_ROPE},
    "Qwen2ForCausalLM": {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True},
    "LlamaForCausalLM": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True},
    "Qwen3MoeForCausalLM": {
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": 96, "num_mtp_layers": 0},
    "DeepseekV2ForCausalLM": {
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
    },
    "Glm4MoeForCausalLM": {
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
    "MiniMaxM2ForCausalLM": {
        "head_dim": 64,
        "rotary_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
    },
    "GptOssForCausalLM": {
        "head_dim": 64,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
        "sliding_window": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
        "swiglu_limit": 0.5,  # so small that it clips some activations of random weights
    },
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 64,
}
SPECIAL |= {
    "Qwen3NextForCausalLM": {**HYBRID, "mlp_only_layers": [0]},
    "Qwen3_5ForCausalLM": {key: HYBRID[key] for key in list(HYBRID)[:5]},
    "Qwen3_5MoeForCausalLM": HYBRID,
    "KimiLinearForCausalLM": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_types": HYBRID["layer_types"],
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "pad_token_id": None,
    },
}
SPECIAL |= {
    "MistralForCausalLM": {"sliding_window": 24, "head_dim": 48},
    "MinistralForCausalLM": {
        "head_dim": 64,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MixtralForCausalLM": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 96,
    },
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 64,
    },
    "SolarOpenForCausalLM": {
        "head_dim": 64,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.5,
    },
    "HYV3ForCausalLM": {
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
    },
    "Ernie4_5ForCausalLM": {"head_dim": 64, "use_bias": True},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "GlmForCausalLM": {"head_dim": 64, "attention_bias": False, "pad_token_id": None},
    "Glm4ForCausalLM": {"head_dim": 64, "attention_bias": True, "pad_token_id": None},
    "Phi3ForCausalLM": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        "pad_token_id": None,
    },
    "SeedOssForCausalLM": {"head_dim": 64, "attention_out_bias": False, "mlp_bias": True},
}
ARCHITECTURES = tuple(SPECIAL)
CONFIG_NAMES = {
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
}

SPARSE = {
    **LATENT,
    "q_lora_rank": 96,
    # With fewer heads, many scores would be zero. If keys have equal scores, two implementations
    # can choose different keys among them.
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 24,
}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 8}
GRANITE = {
    "attention_bias": True,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 6.0,
}
# From position 32 on, queries are multiplied with factors that grow with the position.
GROWING = {**YARN_ROPE, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}
# Families without recorded tokens. Tests check each answer by one pass of transformers over the
# answer.
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "sliding_window": 24,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 40,
        "rope_parameters": {
            "full_attention": LINEAR_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
    },
    "Ministral3ForCausalLM": {"head_dim": 64, "rope_parameters": GROWING, "pad_token_id": None},
    "SmolLM3ForCausalLM": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "pad_token_id": None,
    },
    "Olmo2ForCausalLM": {"attention_bias": True},
    "Olmo3ForCausalLM": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "ApertusForCausalLM": {"pad_token_id": None, "rope_parameters": LLAMA3_ROPE},
    "ArceeForCausalLM": {"mlp_bias": True, "attention_bias": True},
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 96},
    "YoutuForCausalLM": {
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "tie_word_embeddings": True,
        "embedding_initializer_range": 0.1,
    },
    "Exaone4ForCausalLM": {"num_hidden_layers": 4, "head_dim": 64, "sliding_window": 24},
    "CohereForCausalLM": {"logit_scale": 0.3, "attention_bias": True, "use_qk_norm": True},
    "Cohere2ForCausalLM": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "logit_scale": 0.3,
        "tie_word_embeddings": True,
    },
    "GraniteForCausalLM": {**GRANITE, "mlp_bias": True},
    "GraniteMoeForCausalLM": {**GRANITE, **EXPERTS, "intermediate_size": 96},
    "GraniteMoeSharedForCausalLM": {
        **GRANITE,
        **EXPERTS,
        "intermediate_size": 96,
        "shared_intermediate_size": 70,
    },
    "GraniteMoeHybridForCausalLM": {
        **GRANITE,
        "num_local_experts": 0,
        "shared_intermediate_size": 194,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 4,
    },
    "HunYuanDenseV1ForCausalLM": {
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 1.0,
            "alpha": 50.0,
        },
        "attention_bias": True,
    },
    "HunYuanMoEV1ForCausalLM": {
        "head_dim": 64,
        "num_experts": 8,
        "moe_topk": 3,
        "intermediate_size": 96,
    },
    # The number of heads on each rank is no power of two.
    "Glm4MoeLiteForCausalLM": {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 96,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
    },
    "Dots1ForCausalLM": {
        "head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
    },
}
CONFIG_NAMES["Gemma3ForCausalLM"] = "Gemma3TextConfig"
# Architectures without recorded tokens: tests let transformers compute one pass over the answer.
UNRECORDED: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": SPARSE,
    "GlmMoeDsaForCausalLM": {
        **SPARSE,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def make_reference(
    architecture: str, directory: Path | None = None, *, as_saved: bool = False, **overrides: Any
) -> Any:
    """Return a transformers model with seeded weights; write it to ``directory`` if given.

    Args:
        as_saved: if true, the checkpoint uses the names of transformers for configuration keys and
            tensors; if false, it uses the names of the model's authors.
    """
    import transformers

    settings = {**USUAL, **{**SPECIAL, **FAMILIES, **UNRECORDED}[architecture], **overrides}
    name = CONFIG_NAMES.get(architecture, architecture.replace("ForCausalLM", "Config"))
    config = getattr(transformers, name)(**settings)
    model = seeded(getattr(transformers, architecture), config, directory)
    if directory is not None and architecture == "KimiLinearForCausalLM" and not as_saved:
        _publish_kimi_linear(directory)
    return model


def _publish_kimi_linear(directory: Path) -> None:
    """Change the names in a checkpoint of transformers to the names that the authors of Kimi Linear
    use.

    In transformers 5.23, the configuration keys of linear attention have other names. In addition,
    the names of tensors of dense layers have the prefix of expert layers.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types").count("dense")
    config["linear_attn_config"] = {
        "kda_layers": [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "num_heads": config.pop("linear_num_heads"),
        "head_dim": config.pop("linear_head_dim"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config |= {
        "first_k_dense_replace": dense,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    }
    path.write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if re.search(r"block_sparse_moe\.\w+_proj\.", name)]:
        weights[name.replace("block_sparse_moe", "mlp")] = weights.pop(name)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def seeded(model_class: Any, config: Any, directory: Path | None) -> Any:
    """Return a model of transformers with seeded weights; write it to ``directory`` if given."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers initialises these weights to zeros or ones, which would hide errors.
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("A_log", "dt_bias")):
                parameter.normal_(0.0, 0.5)
            elif name.endswith(("alpha_p", "alpha_n")):
                parameter.normal_(0.0, 1.0)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.normal_(0.0, 0.1)
    if directory is not None:
        model.save_pretrained(directory)
    return model


def make_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(0, VOCAB, size=length).tolist() for length in lengths]


def greedy(model: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return ``count`` greedy tokens for each prompt, as transformers generates them.

    All prompts are one batch, padded on the left.
    """
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    rows = zip(missing, prompts, strict=True)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([[0] * n + prompt for n, prompt in rows]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in missing]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, longest:].tolist()


def logprobs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities [len(answer), vocab] at the positions of the answer's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


def add_next_token_module(directory: Path) -> None:
    """Add a next-token module with seeded random weights to a checkpoint. Its predictions are
    arbitrary.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    tensors = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    names, module = read_model_spec(directory).names, f"model.layers.{last + 1}."
    # The next-token module has full attention, even if the model's last layer has linear attention.
    kinds = config.get("layer_types") or ["full_attention"]
    full = last if "linear_attention" not in kinds else kinds.index("full_attention")
    prefix = f"model.layers.{full}."
    for name in [name for name in tensors if name.startswith(prefix)]:
        noise = torch.randn(tensors[name].shape, generator=random)
        stored = names.stored(module + name.removeprefix(prefix))
        tensors[stored] = tensors[name] + 0.1 * noise
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weight = torch.rand(width, generator=random) + 0.5
        tensors[names.stored(f"{module}{name}.weight")] = weight
    mix = torch.randn(width, 2 * width, generator=random)
    tensors[names.stored(f"{module}eh_proj.weight")] = 0.1 * mix
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def copy_of(checkpoint: Path, directory: Path, **changes: Any) -> Path:
    """Copy a checkpoint, and change keys of its config.json."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory
