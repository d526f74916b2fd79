"""GLM-4.5 and 4.6: grouped queries with partly rotated heads, and experts as in DeepSeek V3. Solar
Open has the same experts.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec

ROTATED_PART = 0.5  # rotated part of a head, if config.json has no value


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
