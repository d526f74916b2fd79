"""DeepSeek V3.2 and GLM-5: DeepSeek V3 whose queries attend to keys that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.deepseek import read_latent
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.indexer_spec import check_indexer, read_indexer_spec
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

# The operator takes latents and rotated parts of these sizes only. It multiplies the other parts of
# a head by matrices, whose sizes must be multiples of 16.
LATENT, ROPE, PRODUCT_STEP = 512, 64, 16


def read_sparse_latent(config: ModelConfig) -> ModelSpec:
    indexer = read_indexer_spec(config)
    if indexer is None:
        raise config.unsupported("index_head_dim is missing; the family has an indexer")
    check_indexer(config, indexer)
    return read_decoder(
        config,
        experts=_experts(config),
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


def _experts(config: ModelConfig) -> ExpertSpec | None:
    """Return the experts of DeepSeek V3; a list of layers replaces the number of dense layers."""
    experts, kinds = read_deepseek_experts(config, is_v3=True), config.texts("mlp_layer_types")
    if experts is None or not kinds:
        return experts
    num_layers = config.integer("num_hidden_layers")
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise config.unsupported(
            f"mlp_layer_types is {', '.join(kinds):.80}; it must have dense or sparse for each of "
            f"{num_layers} layers"
        )
    drafts = range(num_layers, num_layers + config.num_draft_layers)
    sparse = (i for i, kind in enumerate(kinds) if kind == "sparse")
    return replace(experts, layers=frozenset((*sparse, *drafts)))
