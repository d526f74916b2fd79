"""The text part of Kimi K2.5, which is a DeepSeek V3. Kimi K2 names the architecture of DeepSeek V3
itself.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.deepseek import read_deepseek_v3
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

NAMES = WeightNames(prefix="language_model.", ignored=("vision_tower.", "mm_projector."))


def read_kimi_k25(config: ModelConfig) -> ModelSpec:
    return replace(read_deepseek_v3(config), names=NAMES)
