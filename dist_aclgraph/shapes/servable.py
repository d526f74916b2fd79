"""Checks whether a supported decoder can be served with a configuration."""

from __future__ import annotations

from pathlib import Path

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.int4_shares import check_int4_shares
from dist_aclgraph.shapes.model_facts import check_model
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.weight_files import tensor_files

# families that are published with one tensor for the experts of a layer
JOINED_EXPERTS = (
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def read_servable_spec(config: Config) -> ModelSpec:
    """Return the shape of a deployment's model.

    Every command calls this function before anything starts, so that ``plan`` and ``simulate``
    refuse the same models as ``serve``.

    Raises:
        ConfigError: the configuration needs a feature that this decoder does not support; see also
            ``check_model``.
        ModelError: see ``read_model_spec``.
    """
    spec, parallel = read_model_spec(config.model, config.model_overrides), config.parallel
    check_model(config, spec)
    if spec.has_sinks and parallel.dcp * parallel.pcp > 1:
        raise ConfigError(
            f"parallel.dcp is {parallel.dcp} and parallel.pcp {parallel.pcp}; contexts of heads "
            f"with sinks, which {spec.architecture} has, cannot be shared: set both to 1"
        )
    if spec.experts is not None and spec.experts.is_stacked and config.makes_int8:
        raise ConfigError(
            f"quantization is {config.quantization}; experts with biases, which "
            f"{spec.architecture} has, cannot be converted to int8: leave quantization out"
        )
    if config.makes_int8 and config.weights == "checkpoint" and _has_joined_experts(config, spec):
        raise ConfigError(
            f"quantization is {config.quantization}; the experts of a layer are one tensor in this "
            f"{spec.architecture}, which cannot be converted to int8: leave quantization out"
        )
    check_int4_shares(spec, parallel)
    return spec


def _has_joined_experts(config: Config, spec: ModelSpec) -> bool:
    """Return whether the checkpoint stores one tensor for the experts of a layer. If there are no
    weight files, return whether published checkpoints of the architecture store one tensor.
    """
    if spec.experts is None:
        return False
    layer = min(spec.experts.layers)
    name = spec.names.stored(f"model.layers.{layer}.mlp.experts.gate_up_proj")
    try:
        return name in tensor_files(Path(config.model))
    except ModelError:  # ``check_weight_files`` refuses broken files before a start
        return spec.architecture in JOINED_EXPERTS
