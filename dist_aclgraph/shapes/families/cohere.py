"""Command R, R+, R7B and A: attention and the MLP have the same input, the result of one layer
norm. Neighbouring elements of a head are rotated as pairs. The logits are multiplied by a factor.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder, without_rope
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.sliding_window import sliding_layers


def read_cohere(config: ModelConfig) -> ModelSpec:
    has_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=config.flag("use_qk_norm", False),
        has_parallel_mlp=True,
        norms_center=True,
        rope_interleaves=True,
        logit_scale=config.positive("logit_scale", 0.0625),
    )


def read_cohere2(config: ModelConfig) -> ModelSpec:
    """Read a decoder in which only layers with a window rotate queries and keys."""
    spec = read_cohere(config)
    return without_rope(spec, set(range(spec.num_layers)) - sliding_layers(config))
