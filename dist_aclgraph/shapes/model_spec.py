"""The shape of a supported decoder, as one frozen value; this module does not need torch.

Supported models: ``Qwen3ForCausalLM``, ``Qwen2ForCausalLM``, ``LlamaForCausalLM``,
``Qwen3MoeForCausalLM``, ``DeepseekV2ForCausalLM`` and ``DeepseekV3ForCausalLM``. One decoder with
switches covers them all: biases of q, k and v, of the output and of the MLP; RMS norms of q and k
heads; latent attention in place of grouped queries; experts in place of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.model_config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ModelConfig,
    read_model_config,
)
from dist_aclgraph.shapes.model_facts import ExpertFacts, ModelFacts, facts_of
from dist_aclgraph.shapes.quantised_formats import check_quantisation
from dist_aclgraph.shapes.rope_spec import RopeSpec, read_rope_spec

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
MIN_EXPERTS_OF_A_GROUP = 3  # required by npu_moe_gating_top_k
LATENT_SIZES = (512, 128, 64, 128)  # latent, plain and rotated part of a head, value


@dataclass(frozen=True, kw_only=True)
class ExpertSpec(ExpertFacts):
    """The experts of a decoder, and which layers have them.

    Attributes:
        width: inner width of one expert.
        renormalizes: whether the weights of a token's experts sum to one, before ``scaling``.
        layers: layers that have experts; the next-token layers are counted after the decoder's
            layers. The other layers have a dense MLP.
        scoring: how a router's logits become the weights of experts.
        num_groups, top_groups: experts are chosen only from the ``top_groups`` best of
            ``num_groups`` groups; 1 and 1 means no groups.
        group_score: score of a group: the score of its best expert, or the sum of its two best
            scores.
        scaling: factor for the experts' weights.
        has_bias: whether a bias is added to the scores for the choice of experts, but not for
            weights.
    """

    width: int
    renormalizes: bool
    layers: frozenset[int]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are computed from one latent per
    token.

    Attributes:
        q_rank: width of the low-rank projection of queries; None without such a projection.
        kv_rank: width of the latent.
        plain_dim, rope_dim: widths of the parts of a query or key head without and with rotary
            embedding.
        value_dim: width of a value head.
        interleaves: true: the checkpoint rotates pairs of neighbouring elements; false: it rotates
            pairs of elements that are half a head apart.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaves: bool


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelFacts):
    """The shape of a supported decoder: the facts of its model, and its details."""

    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    rope: RopeSpec
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None


def read_model_spec(directory: str | Path) -> ModelSpec:
    """Read the shape of a supported decoder from a checkpoint.

    Raises:
        ConfigError: there is no such directory.
        ModelError: its config.json is missing or unreadable, lacks a key, or has an impossible
            value.
        UnsupportedModelError: the architecture, activation, rope scaling or quantisation is not
            implemented.
    """
    config = read_model_config(directory)
    architecture = config.architecture
    if architecture not in ARCHITECTURES:
        raise config.unsupported(
            f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.unsupported(f"hidden_act {activation} is not supported; only silu")
    check_quantisation(config)
    is_deepseek = architecture.startswith("Deepseek")
    attention_bias = config.flag("attention_bias", False)
    facts = facts_of(config)
    facts = replace(
        facts,
        vocab_size=config.integer("vocab_size"),
        experts=_read_experts(config),
        num_draft_layers=facts.num_draft_layers if is_deepseek else 0,
    )
    latent = _latent_spec(config) if is_deepseek else None
    return ModelSpec(
        **vars(facts),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        has_qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        has_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        has_mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        rope=read_rope_spec(config, latent.rope_dim if latent else facts.head_dim),
        latent=latent,
    )


def _read_experts(config: ModelConfig) -> ExpertSpec | None:
    if config.architecture == "Qwen3MoeForCausalLM":
        return _checked(config, _qwen3_experts(config))
    if config.architecture.startswith("Deepseek") and config.has("n_routed_experts"):
        is_v3 = config.architecture == "DeepseekV3ForCausalLM"
        return _checked(config, _deepseek_experts(config, is_v3=is_v3))
    return None


def _checked(config: ModelConfig, experts: ExpertSpec) -> ExpertSpec:
    """Return the experts; refuse numbers of groups and experts that contradict each other."""
    per_group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or not 1 <= experts.top_groups <= experts.num_groups:
        raise ModelError(
            f"{config.path} asks for {experts.top_groups} of {experts.num_groups} groups among "
            f"{experts.num_experts} experts; n_group must divide the experts, and topk_group is at "
            "most n_group"
        )
    if experts.num_groups > 1 and per_group < MIN_EXPERTS_OF_A_GROUP:
        raise config.unsupported(
            f"n_group is {experts.num_groups}: groups of {per_group} experts are not supported; "
            f"they must have {MIN_EXPERTS_OF_A_GROUP} at least"
        )
    if not 1 <= experts.top_k <= experts.top_groups * per_group:
        raise ModelError(
            f"{config.path} asks for {experts.top_k} experts of a token; "
            f"{experts.top_groups * per_group} may be chosen"
        )
    return experts


def _deepseek_experts(config: ModelConfig, *, is_v3: bool) -> ExpertSpec:
    scoring, method = ("sigmoid", "noaux_tc") if is_v3 else ("softmax", "greedy")
    scoring = config.text("scoring_func", scoring)
    method = config.text("topk_method", method)
    known = (
        (("sigmoid", "noaux_tc"),)
        if is_v3
        else (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
    )
    if (scoring, method) not in known:
        raise config.unsupported(
            f"experts chosen by {scoring} scores and {method} are not supported here; supported: "
            f"{', '.join(' and '.join(pair) for pair in known)}"
        )
    has_groups = method != "greedy"
    first = config.integer("first_k_dense_replace", 0, least=0, most=MAX_LAYERS)
    step = config.integer("moe_layer_freq", 1, most=MAX_LAYERS)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS) + config.num_draft_layers
    return ExpertSpec(
        num_experts=config.integer("n_routed_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        # V2 scales or renormalises experts' weights, never both; published checkpoints scale them.
        renormalizes=is_v3 and config.flag("norm_topk_prob", True),
        layers=frozenset(i for i in range(first, num_layers) if i % step == 0),
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
        num_groups=config.integer("n_group", 1, most=MAX_EXPERTS) if has_groups else 1,
        top_groups=config.integer("topk_group", 1, most=MAX_EXPERTS) if has_groups else 1,
        group_score="top2" if is_v3 else "max",
        scaling=config.number("routed_scaling_factor", 1.0),
        num_shared=config.integer("n_shared_experts", 0, least=0, most=MAX_EXPERTS),
        has_bias=is_v3,
    )


def _latent_spec(config: ModelConfig) -> LatentSpec:
    for key in ("attention_bias", "mlp_bias"):
        if config.has(key):
            raise config.unsupported(f"{key} is true; it is not supported beside latent attention")
    latent = LatentSpec(
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_rank=config.integer("kv_lora_rank"),
        plain_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        interleaves=config.flag("rope_interleave", True),
    )
    sizes = (latent.kv_rank, latent.plain_dim, latent.rope_dim, latent.value_dim)
    if sizes != LATENT_SIZES:
        raise config.unsupported(
            "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim are "
            f"{', '.join(map(str, sizes))}; the attention operators take "
            f"{', '.join(map(str, LATENT_SIZES))} only"
        )
    return latent


def _qwen3_experts(config: ModelConfig) -> ExpertSpec:
    step = config.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    layers = (i for i in range(num_layers) if (i + 1) % step == 0)
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    return ExpertSpec(
        num_experts=config.integer(key, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        renormalizes=config.flag("norm_topk_prob", False),
        layers=frozenset(layers) - frozenset(config.integers("mlp_only_layers")),
    )
