"""Llama, and models that differ from it only in their biases and in the keys of config.json."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames

APERTUS_NAMES = WeightNames(
    changes=(
        (".input_layernorm.", ".attention_layernorm."),
        (".post_attention_layernorm.", ".feedforward_layernorm."),
    )
)


def read_llama(config: ModelConfig) -> ModelSpec:
    return _with_biases(config, read_decoder(config))


def _with_biases(config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    """Return a decoder with the biases that config.json enables: ``attention_bias`` for queries,
    keys, values and the output; ``mlp_bias`` for the MLP.
    """
    has_bias = config.flag("attention_bias", False)
    return replace(
        spec,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=config.flag("mlp_bias", False),
    )


def read_iquest_coder(config: ModelConfig) -> ModelSpec:
    if config.has("clip_qkv"):
        raise config.unsupported(
            f"clip_qkv is {config.number('clip_qkv'):g}; limits of queries, keys and values are "
            "not supported"
        )
    if config.flag("use_sliding_window", False):
        raise config.unsupported("use_sliding_window is true; this family has no windows here")
    return read_llama(config)


def read_seed_oss(config: ModelConfig) -> ModelSpec:
    return replace(
        read_decoder(config),
        has_qkv_bias=config.flag("attention_bias", True),
        has_output_bias=config.flag("attention_out_bias", False),
        has_mlp_bias=config.flag("mlp_bias", False),
    )


def read_pangu_embedded(config: ModelConfig) -> ModelSpec:
    """Read openPangu-Embedded, whose products of attention have biases."""
    has_bias = config.flag("bias", True)
    return replace(read_decoder(config), has_qkv_bias=has_bias, has_output_bias=has_bias)


def read_arcee(config: ModelConfig) -> ModelSpec:
    """Read a decoder whose MLP has no gate. The activation of the MLP is the square of ReLU."""
    return _with_biases(config, read_decoder(config, activations=("relu2",)))


def read_apertus(config: ModelConfig) -> ModelSpec:
    """Read a decoder with norms of queries and keys, whose MLP has no gate."""
    spec = _with_biases(config, read_decoder(config, activations=("xielu",)))
    return replace(spec, has_qk_norm=True, names=APERTUS_NAMES)
