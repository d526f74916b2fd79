"""Kimi Linear, and the text part of Kimi K2.5, which is a DeepSeek V3. Kimi K2 names the
architecture of DeepSeek V3 itself.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.deepseek import read_deepseek_v3
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import UNROTATED

NAMES = WeightNames(prefix="language_model.", ignored=("vision_tower.", "mm_projector."))
# Dense layers and shared experts have the usual names of matrices.
LINEAR_NAMES = WeightNames(
    changes=tuple(
        (f".mlp.{part}.", f".block_sparse_moe.{part}.")
        for part in ("gate", "experts", "shared_experts")
    ),
    of_experts=((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")),
)


def read_kimi_linear(config: ModelConfig) -> ModelSpec:
    """Read a decoder with Kimi Delta Attention in most layers. The other layers have latent
    attention, in which nothing is rotated.
    """
    if not config.flag("mla_use_nope", False):
        raise config.unsupported("mla_use_nope is not true; rotated keys are not supported")
    spec = read_deepseek_v3(config)
    if spec.linear is None:
        raise config.unsupported(
            "linear_attn_config is missing; checkpoints with other keys, such as those that "
            "transformers saves, are not supported"
        )
    return replace(spec, names=LINEAR_NAMES, rope=replace(spec.rope, kind=UNROTATED))


def read_kimi_k25(config: ModelConfig) -> ModelSpec:
    return replace(read_deepseek_v3(config), names=NAMES)
