"""Ling 2.0 and Ring 2.0 (BailingMoeV2). Only a part of each head is rotated. Experts are chosen by
the rule of GLM-4.5. The weights have other names. Queries, keys and values are one stored matrix.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.families.joined_weights import QKV, join
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

NAMES = WeightNames(
    changes=(
        (".embed_tokens.", ".word_embeddings."),
        (".self_attn.", ".attention."),
        (".o_proj.", ".dense."),
        (".q_norm.", ".query_layernorm."),
        (".k_norm.", ".key_layernorm."),
        (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
    )
)


def read_bailing_moe_v2(config: ModelConfig) -> ModelSpec:
    """Read a decoder without its next-token modules."""
    for key in ("use_qk_norm", "moe_router_enable_expert_bias"):
        if not config.flag(key, True):
            raise config.unsupported(f"{key} is false; only models with {key} are supported")
    if config.has("norm_head"):
        raise config.unsupported("norm_head is true; normalised weights of heads are not supported")
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True), rotated_part=1.0)
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return replace(
        spec,
        has_qkv_bias=config.flag("use_qkv_bias", False),
        has_output_bias=config.flag("use_bias", False),
        has_qk_norm=True,
        names=join(NAMES, ".query_key_value.", QKV, (num_q, num_kv, num_kv)),
    )
