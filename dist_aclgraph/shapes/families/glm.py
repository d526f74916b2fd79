"""GLM-4, dense and with experts: grouped queries with partly rotated heads.

GLM-4.5, GLM-4.6, Solar Open and dots.llm1 have experts as in DeepSeek V3.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.families.joined_weights import join_gate_up
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import MROPE_SECTION

ROTATED_PART = 0.5  # fraction of a head that is rotated, if config.json has no value


def read_glm(config: ModelConfig, rotated_part: float = ROTATED_PART) -> ModelSpec:
    """Read a decoder in which gate and up are one stored matrix, and neighbouring elements of a
    head are rotated as pairs.

    Args:
        rotated_part: fraction of a head that is rotated, if config.json has no value.
    """
    spec = read_decoder(config, rotated_part=rotated_part)
    return replace(
        spec,
        has_qkv_bias=config.flag("attention_bias", True),
        rope_interleaves=True,
        names=join_gate_up(WeightNames(), spec.intermediate_size),
    )


def read_glm4(config: ModelConfig, rotated_part: float = ROTATED_PART) -> ModelSpec:
    """Read a decoder that also normalises the results of attention and of the MLP."""
    return replace(read_glm(config, rotated_part), has_output_norms=True)


def read_glm4v(config: ModelConfig) -> ModelSpec:
    """Read the decoder of GLM-4.1V. If config.json has no rotated part, whole heads are rotated."""
    return _with_checked_sections(config, read_glm4(config, rotated_part=1.0))


def read_glm4v_moe(config: ModelConfig) -> ModelSpec:
    return _with_checked_sections(config, read_glm4_moe(config))


def read_glm4_moe(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(
        config,
        experts=read_deepseek_experts(config, is_v3=True),
        rotated_part=ROTATED_PART,
        num_draft_layers=config.num_draft_layers,
    )
    return replace(
        spec,
        has_qkv_bias=config.flag("attention_bias", False),
        has_qk_norm=config.flag("use_qk_norm", False),
    )


def read_solar_open(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True))
    return replace(spec, has_qkv_bias=config.flag("attention_bias", False))


def read_dots1(config: ModelConfig) -> ModelSpec:
    """Read a decoder with attention as in Qwen3."""
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True))
    has_bias = config.flag("attention_bias", False)
    return replace(spec, has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True)


def _with_checked_sections(config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    """Return the decoder of a model with images. ``mrope_section`` lists how many frequencies
    encode the time, the row and the column in an image. Raise ModelError if the sum of this list
    differs from the decoder's number of frequencies. transformers cannot run such a decoder, so
    config.json probably has a wrong value for the rotated part of a head.
    """
    if config.rope.has(MROPE_SECTION):
        count = sum(config.rope.positive_numbers(MROPE_SECTION))
        rotary_dim = spec.rotary_dim or spec.head_dim
        if 2 * count != rotary_dim:
            raise ModelError(
                f"{config.path}: {MROPE_SECTION} has {count:g} frequencies, but {rotary_dim} "
                f"elements of a head are rotated, which have {rotary_dim // 2} frequencies; is "
                "partial_rotary_factor missing?"
            )
    return spec
