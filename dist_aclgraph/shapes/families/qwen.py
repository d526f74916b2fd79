"""Qwen2, Qwen2-MoE, Qwen3 and Qwen3-MoE."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import checked_experts
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

SHARED_NAME = (".mlp.shared_experts.", ".mlp.shared_expert.")


def read_qwen2(config: ModelConfig) -> ModelSpec:
    return replace(read_decoder(config), has_qkv_bias=True)


def read_qwen2_without_windows(config: ModelConfig) -> ModelSpec:
    """Read MiMo, or the text part of Qwen2-VL or of Qwen2.5-VL."""
    _refuse_windows(config)
    return read_qwen2(config)


def _refuse_windows(config: ModelConfig) -> None:
    if config.flag("use_sliding_window", False):
        raise config.unsupported("use_sliding_window is true; this family has no windows here")


def read_qwen2_moe(config: ModelConfig) -> ModelSpec:
    """Read a decoder with experts, and with one shared expert whose result is gated."""
    _refuse_windows(config)
    return replace(
        read_decoder(config, experts=with_shared_expert(config, read_qwen_experts(config))),
        has_qkv_bias=config.flag("qkv_bias", True),
        names=WeightNames(changes=(SHARED_NAME,)),
    )


def read_qwen3(config: ModelConfig) -> ModelSpec:
    """Read a dense decoder, which may have next-token modules; published checkpoints have none."""
    return _with_norms(config, read_decoder(config, num_draft_layers=config.num_draft_layers))


def read_qwen3_moe(config: ModelConfig) -> ModelSpec:
    return _with_norms(config, read_decoder(config, experts=read_qwen_experts(config)))


def read_qwen3_vl_moe(config: ModelConfig) -> ModelSpec:
    """Read the text part of a Qwen3-VL with experts. Its joined matrices have shape [in, out]."""
    spec = read_qwen3_moe(config)
    assert spec.experts is not None
    return replace(
        spec, experts=replace(spec.experts, renormalizes=True, joined_is_transposed=True)
    )


def _with_norms(config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    return replace(spec, has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True)


def read_qwen_experts(
    config: ModelConfig, *, num_drafts: int = 0, renormalizes: bool = False
) -> ExpertSpec:
    """Return the experts of Qwen's families, without shared experts.

    Args:
        num_drafts: number of next-token modules, whose layers come after the decoder's layers.
        renormalizes: default of ``norm_topk_prob`` in config.json. True means that the weights of a
            token's experts sum to one.

    Raises:
        ModelError: a key is missing, or has an impossible value.
    """
    step = config.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS) + num_drafts
    layers = (i for i in range(num_layers) if (i + 1) % step == 0)
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = ExpertSpec(
        num_experts=config.integer(key, most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        renormalizes=config.flag("norm_topk_prob", renormalizes),
        layers=frozenset(layers) - frozenset(config.integers("mlp_only_layers")),
    )
    return checked_experts(config, experts)


def with_shared_expert(config: ModelConfig, experts: ExpertSpec) -> ExpertSpec:
    """Add the shared expert, if config.json has its width."""
    shared = config.integer("shared_expert_intermediate_size", 0, least=0)
    return replace(
        experts,
        num_shared=1 if shared else 0,
        shared_width=shared or None,
        gates_shared=shared > 0,
    )
