"""Sampling parameters that a checkpoint recommends for requests that do not set them."""

from __future__ import annotations

from typing import Any

from dist_aclgraph.config import Config
from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.shapes.model_config import read_model_config

# Names in generation_config.json, and the corresponding names in SamplingParams.
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_sampling_defaults(config: Config) -> dict[str, Any]:
    """Return parameters of ``SamplingParams`` from generation_config.json; null counts as absent.

    The result is empty if ``sampling_defaults`` is "none".

    Raises:
        ModelError: a value is outside the range of its parameter.
    """
    if config.sampling_defaults == "none":
        return {}
    model = read_model_config(config.model, config.model_overrides)
    given = {ours: model.generation.get(theirs) for theirs, ours in NAMES.items()}
    found = {name: value for name, value in given.items() if value is not None}
    for name in ("top_k", "max_tokens"):
        if isinstance(value := found.get(name), float) and value.is_integer():
            found[name] = int(value)  # some files contain 50.0 instead of 50
    try:
        SamplingParams(**found)
    except InvalidParameterError as e:
        raise ModelError(
            f"{model.directory / 'generation_config.json'}: {e}; correct it, or set "
            "sampling_defaults=none"
        ) from None
    return found
