"""MiniMax M2: norms over all heads, partly rotated heads, and experts chosen by sigmoid scores.

The published config.json declares modules that predict further tokens (``use_mtp``), but no
checkpoint has the weights of these modules. So the family has no next-token module.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_local_experts
from dist_aclgraph.shapes.families.mistral import MIXTRAL_NAMES
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

NAMES = WeightNames(
    changes=((".mlp.gate.e_score", ".mlp.e_score"), *MIXTRAL_NAMES.changes),
)
FULL_ATTENTION = 1  # the value of full attention in attn_type_list


def read_minimax_m2(config: ModelConfig) -> ModelSpec:
    _refuse_variants(config)
    part = 1.0
    if config.has("rotary_dim"):
        part = config.integer("rotary_dim") / config.integer("head_dim")
    spec = read_decoder(config, rotated_part=part)
    return replace(
        spec,
        experts=read_local_experts(
            config,
            spec.num_layers,
            scoring="sigmoid",
            group_score="top2",
            has_bias=True,
        ),
        has_qk_norm=True,
        names=NAMES,
    )


def _refuse_variants(config: ModelConfig) -> None:
    """Refuse a config.json with values that only earlier models of MiniMax have.

    Raises:
        UnsupportedModelError: a key has a value that is not implemented.
    """
    if (scoring := config.text("scoring_func", "sigmoid")) != "sigmoid":
        raise config.unsupported(f"scoring_func {scoring:.80} is not supported; only sigmoid")
    if (norm := config.text("qk_norm_type", "per_layer")) != "per_layer":
        raise config.unsupported(f"qk_norm_type {norm:.80} is not supported; only per_layer")
    if set(config.integers("attn_type_list")) - {FULL_ATTENTION}:
        raise config.unsupported("attn_type_list has layers of linear attention; only 1 is served")
    for key, wanted in (("use_qk_norm", True), ("use_routing_bias", True)):
        if config.flag(key, wanted) is not wanted:
            raise config.unsupported(f"{key} is false; only models with {key} are supported")
    if config.has("shared_intermediate_size"):
        raise config.unsupported(
            f"shared_intermediate_size is {config.integer('shared_intermediate_size')}; shared "
            "experts of this family are not supported"
        )
