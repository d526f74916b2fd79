"""SmolLM3: a Llama in which every fourth layer rotates neither queries nor keys."""

from __future__ import annotations

from dist_aclgraph.shapes.families.decoder import without_rope
from dist_aclgraph.shapes.families.llama import read_llama
from dist_aclgraph.shapes.model_config import MAX_LAYERS, ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec


def read_smollm3(config: ModelConfig) -> ModelSpec:
    if config.flag("use_sliding_window", False):
        raise config.unsupported("use_sliding_window is true; this family has no windows here")
    spec = read_llama(config)
    # In spite of its name, the list has 1 for a layer that rotates.
    rotates = config.integers("no_rope_layers")
    if not rotates:
        interval = config.integer("no_rope_layer_interval", 4, most=MAX_LAYERS)
        rotates = tuple((i + 1) % interval for i in range(spec.num_layers))
    if len(rotates) < spec.num_layers:
        raise config.unsupported(
            f"no_rope_layers has {len(rotates)} items; each of {spec.num_layers} layers needs one"
        )
    return without_rope(spec, (i for i in range(spec.num_layers) if not rotates[i]))
