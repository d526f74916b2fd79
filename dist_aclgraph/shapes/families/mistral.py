"""Mistral, Ministral and Mixtral: decoders without biases, whose layers may have windows."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_local_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

MIXTRAL_NAMES = WeightNames(
    changes=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    )
)


def read_mistral(config: ModelConfig) -> ModelSpec:
    if config.has("kv_lora_rank"):  # Mistral 4, whose checkpoints also have an image encoder
        raise config.unsupported(
            f"kv_lora_rank is {config.integer('kv_lora_rank')}; latent attention is not supported "
            "in this family"
        )
    return read_decoder(config)


def read_mixtral(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config)
    experts = read_local_experts(config, spec.num_layers)
    return replace(spec, experts=experts, names=MIXTRAL_NAMES)
