"""The text part of a checkpoint that also has an image encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

# The weights of the text part begin with "model.language_model." in place of "model."; the name of
# the output head is the usual name.
INNER_NAMES = WeightNames(
    changes=(("model.", "model.language_model."),), ignored=("model.visual.",)
)
# The weights of the text part have the usual names.
OLDER_NAMES = WeightNames(ignored=("visual.",))
# All weights of the text part, including the output head, have a prefix.
OUTER_NAMES = WeightNames(
    prefix="language_model.",
    ignored=("vision_tower.", "mm_projector.", "multi_modal_projector."),
)


def beside_images(
    read: Callable[[ModelConfig], ModelSpec], names: WeightNames
) -> Callable[[ModelConfig], ModelSpec]:
    """Return a function that reads the text part with ``read``.

    Args:
        names: ``prefix`` and ``changes`` for the weights of the text part; ``ignored`` for the
            weights of all other parts.
    """

    def read_text_part(config: ModelConfig) -> ModelSpec:
        spec = read(config)
        of_text = replace(
            spec.names,
            prefix=names.prefix,
            changes=(*spec.names.changes, *names.changes),
            ignored=names.ignored,
        )
        return replace(spec, names=of_text)

    return read_text_part
