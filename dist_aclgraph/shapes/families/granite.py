"""Granite 3 and 4 without Mamba, and MiniCPM: a Llama that multiplies embeddings, results of layers
and logits by factors. Granite with experts stores the matrices of all experts in one tensor. In
this tensor, gate and up are joined.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import without_rope
from dist_aclgraph.shapes.families.experts import read_local_experts
from dist_aclgraph.shapes.families.joined_weights import join
from dist_aclgraph.shapes.families.llama import read_llama
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

NAMES = WeightNames(
    changes=(
        (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
        (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
        (".mlp.gate.", ".block_sparse_moe.router.layer."),
        (".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear."),
        (".mlp.down_proj.", ".shared_mlp.output_linear."),
    )
)
# These texts include the name of the module, because ".gate_proj." alone would also match the
# matrices of routed experts.
SHARED_GATE_UP = (".mlp.shared_experts.gate_proj.", ".mlp.shared_experts.up_proj.")
DENSE_GATE_UP = (".mlp.gate_proj.", ".mlp.up_proj.")

MAY_NOT_ROTATE = ("GraniteMoeHybridForCausalLM",)


def read_granite(config: ModelConfig) -> ModelSpec:
    return replace(
        read_llama(config),
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        attention_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )


def read_granite_moe(config: ModelConfig) -> ModelSpec:
    """Read a decoder with routed experts, with shared experts (``shared_intermediate_size``), or
    with both kinds.
    """
    if set(config.texts("layer_types") or config.texts("layers_block_type")) - {
        "attention",
        "full_attention",
    }:
        raise config.unsupported("some layers are of Mamba, which is not supported")
    spec = read_granite(config)
    # In the hybrid family, a ``position_embedding_type`` that is absent or null means that nothing
    # is rotated.
    usual = "nope" if config.architecture in MAY_NOT_ROTATE else "rope"
    if config.text("position_embedding_type", usual) != "rope":
        spec = without_rope(spec, range(spec.num_layers))
    shared = config.integer("shared_intermediate_size", 0, least=0)
    parts, width = DENSE_GATE_UP, shared
    if config.has("num_local_experts"):
        parts = SHARED_GATE_UP
        experts = read_local_experts(config, spec.num_layers)
        if shared:
            experts = replace(experts, num_shared=1, shared_width=shared)
        spec = replace(spec, experts=experts)
    names = join(NAMES, ".shared_mlp.input_linear.", parts, (width, width)) if shared else NAMES
    return replace(spec, intermediate_size=shared or spec.intermediate_size, names=names)


def read_minicpm(config: ModelConfig) -> ModelSpec:
    if config.has("num_experts"):
        raise config.unsupported("num_experts is given; experts of this family are not supported")
    spec = read_llama(config)
    return replace(
        spec,
        embedding_scale=config.positive("scale_emb", 1.0),
        residual_scale=config.positive("scale_depth", 1.0) * spec.num_layers**-0.5,
        logit_scale=config.integer("dim_model_base", 1) / spec.hidden_size,
    )
