"""Qwen3-Next and Qwen3.5: linear attention in most layers; in the other layers, grouped queries
with gates of the results. Norms have the factor 1 + weight.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.qwen import read_qwen_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

ROTATED_PART = 0.25  # if config.json does not say it
SHARED = ("shared_experts", "shared_expert")
NAMES = WeightNames(changes=(SHARED,), ignored=("mtp.",))
# Checkpoints with an encoder of images have another beginning of the names.
NAMES_BESIDE_IMAGES = WeightNames(
    changes=(SHARED, ("model.", "model.language_model.")), ignored=("mtp.", "model.visual.")
)


def read_qwen3_next(config: ModelConfig) -> ModelSpec:
    return _read(config, _experts(config))


def read_qwen3_5(config: ModelConfig) -> ModelSpec:
    return _read(config)


def read_qwen3_5_moe(config: ModelConfig) -> ModelSpec:
    return _read(config, _experts(config), has_mlps=False)


def _read(
    config: ModelConfig, experts: ExpertSpec | None = None, *, has_mlps: bool = True
) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        experts=experts,
        rotated_part=ROTATED_PART,
        # Qwen3.5 with experts has no layers without experts.
        inner_width="intermediate_size" if has_mlps else "moe_intermediate_size",
    )
    beside_images = config.architecture.endswith("ForConditionalGeneration")
    return replace(
        spec,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        has_output_gate=True,
        norms_add_one=True,
        names=NAMES_BESIDE_IMAGES if beside_images else NAMES,
    )


def _experts(config: ModelConfig) -> ExpertSpec:
    experts = read_qwen_experts(config, renormalizes=True)
    shared = config.integer("shared_expert_intermediate_size")
    if shared % experts.width:
        raise config.unsupported(
            f"shared_expert_intermediate_size is {shared}; only multiples of "
            f"moe_intermediate_size, {experts.width}, are supported"
        )
    return replace(experts, num_shared=shared // experts.width, has_shared_gate=True)
