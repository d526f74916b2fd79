"""What a checkpoint's config.json says, as one frozen value; nothing here needs torch.

Supported: ``Qwen3ForCausalLM``, ``Qwen2ForCausalLM``, ``LlamaForCausalLM``,
``Qwen3MoeForCausalLM``, ``DeepseekV2ForCausalLM`` and ``DeepseekV3ForCausalLM``. They are one
decoder with switches: biases of q, k and v, of the output and of the MLP; RMS norms of q and k
heads; latent attention in place of grouped queries; experts in place of the MLP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.quantised_formats import check_quantisation

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
LATENT_SIZES = (512, 128, 64, 128)  # latent, plain and rotated part of a head, value
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
        renormalizes: whether the weights of a token's experts sum to one, before ``scaling``.
        layers: layers that have experts, those behind the decoder's own included; the others have
            a dense MLP.
        scoring: how a router's logits become the weights of experts.
        num_groups, top_groups: experts are chosen from the best groups only; 1 of 1: no groups.
        group_score: what is compared of groups, their best expert or the sum of their best two.
        scaling: factor on the weights.
        num_shared: experts that every token runs, as one of their joint width.
        has_bias: whether the choice, but not the weights, adds a bias to the scores.
    """

    num_experts: int
    top_k: int
    width: int
    renormalizes: bool
    layers: frozenset[int]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    num_shared: int = 0
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are made of one latent per token.

    Attributes:
        q_rank: width that queries are squeezed through, None where they are not.
        kv_rank: width of the latent.
        plain_dim, rope_dim: parts of a query or key head without and with rotary embedding.
        value_dim: width of a value head.
        interleaves: whether the checkpoint rotates neighbouring elements, not those half a head
            apart.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaves: bool


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder.

    Attributes:
        num_draft_layers: layers behind the decoder's own that predict tokens further ahead.
    """

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
    latent: LatentSpec | None = None
    num_draft_layers: int = 0


def read_model_spec(directory: str | Path) -> ModelSpec:
    """Read config.json (and generation_config.json for the end tokens) of a checkpoint.

    Raises:
        ModelError: the directory or its config.json is missing or unreadable, or lacks a key.
        UnsupportedModelError: the architecture, activation, rope scaling or quantisation is not
            implemented.
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
    try:
        return _model_spec(raw, Path(directory))
    except KeyError as e:
        raise ModelError(f"{path} lacks the key {e.args[0]}; is it a whole checkpoint's?") from e


def _model_spec(raw: dict[str, Any], directory: Path) -> ModelSpec:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']} is not supported; only silu")
    check_quantisation(Path(directory), raw)
    if raw.get("use_sliding_window"):
        raise UnsupportedModelError("sliding window attention is not supported")
    is_deepseek = architecture.startswith("Deepseek")
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
        eos_token_ids=_eos_token_ids(directory, raw),
        experts=_read_experts(architecture, raw),
        latent=_latent_spec(raw) if is_deepseek else None,
        num_draft_layers=_num_draft_layers(raw) if is_deepseek else 0,
    )


def _read_experts(architecture: str, raw: dict[str, Any]) -> ExpertSpec | None:
    if architecture == "Qwen3MoeForCausalLM":
        return _checked(_qwen3_experts(raw))
    if architecture.startswith("Deepseek") and raw.get("n_routed_experts"):
        return _checked(_deepseek_experts(raw, is_v3=architecture == "DeepseekV3ForCausalLM"))
    return None


def _checked(experts: ExpertSpec) -> ExpertSpec:
    """Refuse numbers of experts that no router can choose by."""
    per_group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or not 1 <= experts.top_groups <= experts.num_groups:
        raise ModelError(
            f"config.json asks for {experts.top_groups} of {experts.num_groups} groups among "
            f"{experts.num_experts} experts; groups must be equal, and there must be so many"
        )
    if not 1 <= experts.top_k <= experts.top_groups * per_group:
        raise ModelError(
            f"config.json asks for {experts.top_k} experts of a token; "
            f"{experts.top_groups * per_group} may be chosen"
        )
    return experts


def _deepseek_experts(raw: dict[str, Any], *, is_v3: bool) -> ExpertSpec:
    scoring, method = ("sigmoid", "noaux_tc") if is_v3 else ("softmax", "greedy")
    scoring, method = raw.get("scoring_func", scoring), raw.get("topk_method", method)
    known = (
        (("sigmoid", "noaux_tc"),)
        if is_v3
        else (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
    )
    if (scoring, method) not in known:
        raise UnsupportedModelError(
            f"experts chosen by {scoring} scores and {method} are not supported here; supported: "
            f"{', '.join(' and '.join(pair) for pair in known)}"
        )
    has_groups = method != "greedy"
    first, step = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    num_layers = raw["num_hidden_layers"] + _num_draft_layers(raw)
    return ExpertSpec(
        num_experts=raw["n_routed_experts"],
        top_k=raw["num_experts_per_tok"],
        width=raw["moe_intermediate_size"],
        # Weights of V2 are scaled or renormalised, never both; published ones are scaled.
        renormalizes=is_v3 and bool(raw.get("norm_topk_prob", True)),
        layers=frozenset(i for i in range(first, num_layers) if i % step == 0),
        scoring=scoring,
        num_groups=(has_groups and raw.get("n_group")) or 1,
        top_groups=(has_groups and raw.get("topk_group")) or 1,
        group_score="top2" if is_v3 else "max",
        scaling=float(raw.get("routed_scaling_factor") or 1.0),
        num_shared=raw.get("n_shared_experts") or 0,
        has_bias=is_v3,
    )


def _num_draft_layers(raw: dict[str, Any]) -> int:
    return int(raw.get("num_nextn_predict_layers", raw.get("num_mtp_layers")) or 0)


def _latent_spec(raw: dict[str, Any]) -> LatentSpec:
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UnsupportedModelError(f"{key} is not supported beside latent attention")
    latent = LatentSpec(
        q_rank=raw["q_lora_rank"],
        kv_rank=raw["kv_lora_rank"],
        plain_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
        interleaves=bool(raw.get("rope_interleave", True)),
    )
    sizes = (latent.kv_rank, latent.plain_dim, latent.rope_dim, latent.value_dim)
    if sizes != LATENT_SIZES:
        raise UnsupportedModelError(
            "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim are "
            f"{', '.join(map(str, sizes))}; the attention operators take "
            f"{', '.join(map(str, LATENT_SIZES))} only"
        )
    return latent


def _qwen3_experts(raw: dict[str, Any]) -> ExpertSpec:
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
