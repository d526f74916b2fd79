"""EXAONE 4: as in OLMo 2, only results are normalised. If some layers have a window, the other
layers rotate neither queries nor keys.
"""

from __future__ import annotations

from dist_aclgraph.shapes.families.decoder import read_decoder, without_rope
from dist_aclgraph.shapes.families.olmo import with_output_norms
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec


def read_exaone4(config: ModelConfig) -> ModelSpec:
    spec = with_output_norms(config, read_decoder(config))
    if spec.window is None:
        return spec
    return without_rope(spec, set(range(spec.num_layers)) - spec.window.layers)
