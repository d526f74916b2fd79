"""OLMo 2 and 3: only the results of attention and of the MLP are normalised. One norm spans all
heads of queries, and another norm spans all heads of keys. OLMoE also has these two norms.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import checked_experts
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec, LayerRope, ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import read_window_rope
from dist_aclgraph.shapes.sliding_window import sliding_layers

OUTPUT_NORMS = WeightNames(
    changes=(
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    )
)
WINDOW_THETA = 500000.0  # default base of the rotary embedding of layers with a window


def read_olmo2(config: ModelConfig) -> ModelSpec:
    return with_output_norms(config, read_decoder(config))


def read_olmo3(config: ModelConfig) -> ModelSpec:
    """Read a decoder in which only the layers without a window have a scaled rotary embedding."""
    spec = with_output_norms(config, read_decoder(config, ropes_by_type=True))
    rope = read_window_rope(config, spec.head_dim, WINDOW_THETA)
    return replace(spec, other_rope=LayerRope(rope, sliding_layers(config)))


def read_olmoe(config: ModelConfig) -> ModelSpec:
    """Read a decoder with experts. The inputs of attention and of the experts are normalised."""
    if config.has("clip_qkv"):
        raise config.unsupported(
            f"clip_qkv is {config.number('clip_qkv'):g}; limits of queries, keys and values are "
            "not supported"
        )
    spec = read_decoder(config)
    experts = ExpertSpec(
        num_experts=config.integer("num_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("intermediate_size"),
        renormalizes=config.flag("norm_topk_prob", False),
        layers=frozenset(range(spec.num_layers)),
    )
    has_bias = config.flag("attention_bias", False)
    return replace(
        spec,
        experts=checked_experts(config, experts),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
    )


def with_output_norms(config: ModelConfig, spec: ModelSpec) -> ModelSpec:
    """Return a decoder that normalises the results of attention and of the MLP, and not their
    inputs. Queries and keys are also normalised.
    """
    has_bias = config.flag("attention_bias", False)
    return replace(
        spec,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        has_input_norms=False,
        has_output_norms=True,
        names=OUTPUT_NORMS,
    )
