"""EXAONE 4: only the results of attention and of the MLP are normalised, as in OLMo 2. If
config.json sets a window, the layers without a window rotate neither queries nor keys.
"""

from __future__ import annotations

from dist_aclgraph.shapes.families.decoder import read_decoder, without_rope
from dist_aclgraph.shapes.families.olmo import with_output_norms
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.sliding_window import sets_window, sliding_layers


def read_exaone4(config: ModelConfig) -> ModelSpec:
    spec = with_output_norms(config, read_decoder(config))
    if not sets_window(config):
        return spec
    return without_rope(spec, set(range(spec.num_layers)) - sliding_layers(config))
