"""DeepSeek V3.2 and GLM-5: variants of DeepSeek V3 in which an indexer chooses the keys to which a
query attends.
"""

from __future__ import annotations

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.deepseek import read_latent
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.indexer_spec import check_indexer, read_indexer_spec
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import LatentSpec, ModelSpec

# The attention operator accepts only latents and rotated parts of these sizes. The other parts of
# a head are multiplied by matrices, whose sizes must be multiples of 16.
LATENT, ROPE, PRODUCT_STEP = 512, 64, 16


def read_sparse_latent(config: ModelConfig) -> ModelSpec:
    indexer = read_indexer_spec(config)
    if indexer is None:
        raise config.unsupported("index_head_dim is missing; the family has an indexer")
    check_indexer(config, indexer)
    return read_decoder(
        config,
        experts=read_deepseek_experts(config, is_v3=True),
        latent=_latent(config),
        num_draft_layers=config.num_draft_layers,
    )


def _latent(config: ModelConfig) -> LatentSpec:
    latent = read_latent(config)
    if latent.q_rank is None:
        raise config.unsupported("q_lora_rank is missing; index queries are computed from it")
    others = latent.plain_dim, latent.value_dim
    if (latent.kv_rank, latent.rope_dim) != (LATENT, ROPE) or any(d % PRODUCT_STEP for d in others):
        raise config.unsupported(
            f"kv_lora_rank is {latent.kv_rank}, qk_rope_head_dim {latent.rope_dim}, "
            f"qk_nope_head_dim {latent.plain_dim} and v_head_dim {latent.value_dim}; the operators "
            f"take {LATENT}, {ROPE}, and multiples of {PRODUCT_STEP}"
        )
    return latent
