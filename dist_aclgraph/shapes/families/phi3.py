"""Phi-3 and Phi-4 store queries, keys and values as one matrix, and gate and up as another."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.joined_weights import QKV, join, join_gate_up
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames


def read_phi3(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config, rotated_part=1.0)
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    names = join(WeightNames(), ".qkv_proj.", QKV, (num_q, num_kv, num_kv))
    return replace(spec, names=join_gate_up(names, spec.intermediate_size))
