"""Hunyuan V1, dense and with experts, and Hunyuan 3 (Hy3).

In V1, queries and keys are first rotated and then normalised. Hy3 has experts chosen by sigmoid
scores; the next-token module of the published checkpoint is not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import checked_experts, read_deepseek_experts
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

HEAD_NORMS = ((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm."))
SHARED = (".mlp.shared_experts.", ".mlp.shared_mlp.")
V1_NAMES = WeightNames(changes=(*HEAD_NORMS, (".mlp.gate.", ".mlp.gate.wg."), SHARED))
NAMES = WeightNames(
    changes=(
        (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.gate.", ".mlp.router.gate."),
        SHARED,
    )
)


def read_hunyuan_v1(config: ModelConfig) -> ModelSpec:
    if config.has("use_cla"):
        raise config.unsupported("use_cla is true; layers that share keys are not supported")
    if not config.flag("use_qk_norm", True):
        raise config.unsupported("use_qk_norm is false; only models with use_qk_norm are supported")
    has_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        norms_follow_rope=True,
        names=V1_NAMES,
    )


def read_hunyuan_v1_moe(config: ModelConfig) -> ModelSpec:
    """Read a decoder with experts in all layers. The published config.json lists some values for
    each layer; all layers must have the same value.
    """
    spec = read_hunyuan_v1(config)
    width = config.same_integer("moe_intermediate_size", spec.intermediate_size)
    experts = ExpertSpec(
        num_experts=config.integer("num_experts", most=MAX_EXPERTS),
        top_k=config.same_integer("num_experts_per_tok", 1, most=MAX_EXPERTS),
        width=width,
        renormalizes=True,
        layers=frozenset(range(spec.num_layers)),
        num_shared=1,
        shared_width=config.same_integer("n_shared_experts", 1, most=MAX_EXPERTS) * width,
    )
    return replace(spec, experts=checked_experts(config, experts))


def read_hy_v3(config: ModelConfig) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise config.unsupported(f"{key} is true; this family has no biases here")
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True))
    return replace(spec, has_qk_norm=True, names=NAMES)
