"""Llama: all four products of attention have biases, or none has; the same holds for the MLP."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec


def read_llama(config: ModelConfig) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
    )
