"""gpt-oss: sinks and sliding windows, biases in all products, and a limited gated activation.

The published checkpoints store the weights of experts in MXFP4. Loading converts these weights to
floats.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_local_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, SwigluClip, WeightNames

NAMES = WeightNames(changes=((".mlp.gate.", ".mlp.router."),))


def read_gpt_oss(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config)
    has_bias = config.flag("attention_bias", True)
    return replace(
        spec,
        experts=read_local_experts(
            config,
            spec.num_layers,
            has_product_biases=True,
            clip=SwigluClip(
                config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
            ),
            is_stacked=True,
        ),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        names=NAMES,
    )
