"""ERNIE 4.5: neighbouring elements of queries and keys are rotated as pairs. Experts are chosen by
softmax scores with a bias.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import checked_experts
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

NAMES = WeightNames(changes=((".mlp.gate.e_score", ".mlp.moe_statics.e_score"),))


def read_ernie(config: ModelConfig) -> ModelSpec:
    has_bias = config.flag("use_bias", False)
    return replace(
        read_decoder(config),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
        rope_interleaves=True,
    )


def read_ernie_moe(config: ModelConfig) -> ModelSpec:
    if config.flag("use_bias", False):
        raise config.unsupported("use_bias is true; biases beside experts are not supported")
    return replace(read_ernie(config), experts=_experts(config), names=NAMES)


def _experts(config: ModelConfig) -> ExpertSpec:
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    first = config.integer("moe_layer_start_index", 1, least=0, most=MAX_LAYERS)
    last = config.integer("moe_layer_end_index", -1, least=-1, most=MAX_LAYERS)
    step = config.integer("moe_layer_interval", 1, most=MAX_LAYERS)
    end = num_layers if last == -1 else min(last + 1, num_layers)
    experts = ExpertSpec(
        num_experts=config.integer("num_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        renormalizes=True,
        layers=frozenset(i for i in range(first, end) if (i + 1) % step == 0),
        num_shared=config.integer("n_shared_experts", 2, least=0, most=MAX_EXPERTS),
        has_bias=True,
        bias_is_row=True,
    )
    return checked_experts(config, experts)
