"""Qwen3-Next and Qwen3.5: three layers of linear attention before each layer of full attention,
whose results have gates. Norms add one to their weights.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import checked_experts
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

ROTATED_PART = 0.25  # if config.json does not say it
SHARED_NAME = (".mlp.shared_experts.", ".mlp.shared_expert.")
# The text part of a model with an encoder of images. The head is outside of it.
TEXT_NAME = ("model.", "model.language_model.")
OTHER_PARTS = ("model.visual.",)


def read_qwen3_next(config: ModelConfig) -> ModelSpec:
    step = config.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    return _read(config, step=step)


def read_qwen3_5(config: ModelConfig) -> ModelSpec:
    return _read(config)


def read_qwen3_5_with_images(config: ModelConfig) -> ModelSpec:
    """Read the text part of a checkpoint that also has an encoder of images."""
    spec = _read(config)
    names = replace(spec.names, changes=(*spec.names.changes, TEXT_NAME), ignored=OTHER_PARTS)
    return replace(spec, names=names)


def _read(config: ModelConfig, *, step: int = 1) -> ModelSpec:
    """Return the shape of either family.

    Args:
        step: every ``step``-th layer has experts, if the model has experts.
    """
    if config.has("attention_bias"):
        raise config.unsupported("attention_bias is true; it is not supported beside gates")
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    num_drafts = config.num_draft_layers
    experts = _experts(config, num_layers + num_drafts, step) if config.has("num_experts") else None
    spec = read_decoder(
        config, experts=experts, rotated_part=ROTATED_PART, num_draft_layers=num_drafts
    )
    if spec.linear is None:
        raise config.unsupported("no layer has linear attention; such a model is not supported")
    return replace(
        spec,
        has_qk_norm=True,
        has_output_gate=True,
        norm_adds_one=True,
        names=WeightNames(changes=(SHARED_NAME, *_module_names(num_layers))),
    )


def _module_names(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Return the names of the next-token module, which is the layer after the last layer."""
    module = f"model.layers.{num_layers}."
    return (
        (f"{module}eh_proj.", "mtp.fc."),
        (f"{module}enorm.", "mtp.pre_fc_norm_embedding."),
        (f"{module}hnorm.", "mtp.pre_fc_norm_hidden."),
        (f"{module}shared_head.norm.", "mtp.norm."),
        (module, "mtp.layers.0."),
    )


def _experts(config: ModelConfig, num_layers: int, step: int) -> ExpertSpec:
    layers = (i for i in range(num_layers) if (i + 1) % step == 0)
    shared = config.integer("shared_expert_intermediate_size", 0, least=0)
    experts = ExpertSpec(
        num_experts=config.integer("num_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        renormalizes=config.flag("norm_topk_prob", True),
        layers=frozenset(layers) - frozenset(config.integers("mlp_only_layers")),
        num_shared=1 if shared else 0,
        shared_width=shared or None,
        gates_shared=shared > 0,
    )
    return checked_experts(config, experts)
