"""Phi-3 and Phi-4: queries, keys and values are one stored matrix, gate and up another one."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, RowRange, WeightNames

QKV = (".q_proj.", ".k_proj.", ".v_proj.")
GATE_UP = (".gate_proj.", ".up_proj.")


def read_phi3(config: ModelConfig) -> ModelSpec:
    spec = read_decoder(config, rotated_part=1.0)
    num_q, num_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    width = spec.intermediate_size
    names = WeightNames(
        changes=(
            *((part, ".qkv_proj.") for part in QKV),
            *((part, ".gate_up_proj.") for part in GATE_UP),
        ),
        ranges=(*_joined(QKV, (num_q, num_kv, num_kv)), *_joined(GATE_UP, (width, width))),
    )
    return replace(spec, names=names)


def _joined(parts: tuple[str, ...], counts: tuple[int, ...]) -> tuple[RowRange, ...]:
    """Return the rows of tensors that follow each other in one stored tensor."""
    total = sum(counts)
    return tuple(
        RowRange(part, sum(counts[:index]), count, total)
        for index, (part, count) in enumerate(zip(parts, counts, strict=True))
    )
