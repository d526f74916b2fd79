"""dots.llm1: attention as in Qwen3, and experts as in DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec


def read_dots1(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True))
    has_bias = config.flag("attention_bias", False)
    return replace(spec, has_qkv_bias=has_bias, has_output_bias=has_bias, has_qk_norm=True)
