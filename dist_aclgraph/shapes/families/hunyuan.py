"""Hunyuan 3 (Hy3): norms of queries and keys, and experts chosen by sigmoid scores.

The next-token module of the published checkpoint is not loaded.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

NAMES = WeightNames(
    changes=(
        (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.gate.", ".mlp.router.gate."),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    )
)


def read_hy_v3(config: ModelConfig) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise config.unsupported(f"{key} is true; this family has no biases here")
    spec = read_decoder(config, experts=read_deepseek_experts(config, is_v3=True))
    return replace(spec, has_qk_norm=True, names=NAMES)
