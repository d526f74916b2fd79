"""Qwen3-Next and Qwen3.5: most layers have linear attention. The other layers have full attention,
and its results are gated. Norms add one to their weights.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.qwen import (
    SHARED_NAME,
    read_qwen_experts,
    with_shared_expert,
)
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, ModelSpec, WeightNames

ROTATED_PART = 0.25  # fraction of a head that is rotated, if config.json has no value


def read_qwen3_next(config: ModelConfig) -> ModelSpec:
    if config.has("attention_bias"):
        raise config.unsupported("attention_bias is true; it is not supported beside gates")
    spec = read_decoder(
        config,
        experts=_experts(config) if config.has("num_experts") else None,
        rotated_part=ROTATED_PART,
        num_draft_layers=config.num_draft_layers,
    )
    if spec.linear is None:
        raise config.unsupported("no layer has linear attention; such a model is not supported")
    return replace(
        spec,
        has_qk_norm=True,
        has_output_gate=True,
        norm_adds_one=True,
        names=WeightNames(changes=(SHARED_NAME, *_module_names(spec.num_layers))),
    )


def _module_names(num_layers: int) -> tuple[tuple[str, str], ...]:
    """Return the names of the next-token module's weights. The module's index follows the index of
    the last layer.
    """
    module = f"model.layers.{num_layers}."
    return (
        (f"{module}eh_proj.", "mtp.fc."),
        (f"{module}enorm.", "mtp.pre_fc_norm_embedding."),
        (f"{module}hnorm.", "mtp.pre_fc_norm_hidden."),
        (f"{module}shared_head.norm.", "mtp.norm."),
        (module, "mtp.layers.0."),
    )


def _experts(config: ModelConfig) -> ExpertSpec:
    num_drafts = config.num_draft_layers
    experts = read_qwen_experts(config, num_drafts=num_drafts, renormalizes=True)
    return with_shared_expert(config, experts)
