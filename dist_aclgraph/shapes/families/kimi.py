"""Kimi Linear. Kimi K2, and the text part of Kimi K2.5, have the architecture of DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.deepseek import read_deepseek_v3
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import UNROTATED

OF_EXPERTS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))
# The matrices of dense layers and of shared experts have the usual names, such as gate_proj.
PUBLISHED_NAMES = WeightNames(
    changes=tuple(
        (f".mlp.{part}.", f".block_sparse_moe.{part}.")
        for part in ("gate", "experts", "shared_experts")
    ),
    of_experts=OF_EXPERTS,
)
# In checkpoints that transformers 5.23 has saved, dense MLPs have the prefix
# ``.block_sparse_moe.``. The other names are the names of ``PUBLISHED_NAMES``.
SAVED_NAMES = WeightNames(changes=((".mlp.", ".block_sparse_moe."),), of_experts=OF_EXPERTS)


def read_kimi_linear(config: ModelConfig) -> ModelSpec:
    """Read a decoder with Kimi Delta Attention in most layers. The other layers have latent
    attention, in which nothing is rotated. Published checkpoints have the key
    ``linear_attn_config`` in config.json. Checkpoints that transformers has saved have other keys.
    """
    if not config.flag("mla_use_nope", True):
        raise config.unsupported("mla_use_nope is false; rotated keys are not supported")
    names = PUBLISHED_NAMES if config.has("linear_attn_config") else SAVED_NAMES
    spec = read_deepseek_v3(config)
    if spec.linear is None:
        raise config.unsupported("linear_attn_config is missing; the family has linear attention")
    return replace(spec, names=names, rope=replace(spec.rope, kind=UNROTATED))
