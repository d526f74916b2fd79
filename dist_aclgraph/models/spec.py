"""What a checkpoint's config.json says, as one frozen value; nothing here needs torch.

Supported: ``Qwen3ForCausalLM``, ``Qwen2ForCausalLM``, ``LlamaForCausalLM`` and
``Qwen3MoeForCausalLM``. They are one decoder with switches: biases of q, k and v, of the output and
of the MLP; RMS norms of q and k heads; experts in place of the MLP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import ModelError, UnsupportedModelError

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base, how much of a head turns, and the scaling of long contexts."""

    theta: float
    kind: str  # one of ROPE_TYPES
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The experts of a decoder, and which layers have them.

    Attributes:
        width: inner width of one expert.
        renormalizes: whether the weights of a token's experts sum to one.
        layers: layers that have experts; the others have a dense MLP.
    """

    num_experts: int
    top_k: int
    width: int
    renormalizes: bool
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    max_position_embeddings: int
    rope: RopeSpec
    eos_token_ids: tuple[int, ...]
    experts: ExpertSpec | None = None


def read_model_spec(directory: str | Path) -> ModelSpec:
    """Read config.json (and generation_config.json for the end tokens) of a checkpoint.

    Raises:
        ModelError: the directory or its config.json is missing or unreadable.
        UnsupportedModelError: the architecture, activation or rope scaling is not implemented.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelError(
            f"cannot read {path}: {e.strerror}; `model` must be a directory with a Hugging Face "
            "checkpoint (config.json, *.safetensors, tokenizer.json)"
        ) from e
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']} is not supported; only silu")
    if raw.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints are not supported")
    if raw.get("use_sliding_window"):
        raise UnsupportedModelError("sliding window attention is not supported")
    num_heads = raw["num_attention_heads"]
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        has_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        max_position_embeddings=raw["max_position_embeddings"],
        rope=_rope_spec(raw),
        eos_token_ids=_eos_token_ids(Path(directory), raw),
        experts=_expert_spec(raw) if architecture == "Qwen3MoeForCausalLM" else None,
    )


def _expert_spec(raw: dict[str, Any]) -> ExpertSpec:
    step, dense = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    layers = (i for i in range(raw["num_hidden_layers"]) if (i + 1) % step == 0)
    return ExpertSpec(
        num_experts=raw.get("num_experts") or raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        width=raw["moe_intermediate_size"],
        renormalizes=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(layers) - dense,
    )


def _rope_spec(raw: dict[str, Any]) -> RopeSpec:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope scaling {kind} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial rotary embeddings are not supported")
    optional = (
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    return RopeSpec(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        max_position_embeddings=raw["max_position_embeddings"],
        factor=float(scaling.get("factor") or 1.0),
        original_max_position_embeddings=scaling.get("original_max_position_embeddings"),
        **{key: scaling[key] for key in optional if scaling.get(key) is not None},
    )


def _eos_token_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    ids = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", ids)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
