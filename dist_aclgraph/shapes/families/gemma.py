"""Gemma 3: there are norms before and after attention, and before and after the MLP. These norms
multiply by ``1 + weight``. Most layers have a window; these layers have a separate rotary
embedding.
"""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import LayerRope, ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import read_window_rope
from dist_aclgraph.shapes.sliding_window import sliding_layers

NAMES = WeightNames(
    changes=(
        (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
        (".post_self_attn_layernorm.", ".post_attention_layernorm."),
        (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
    )
)
WINDOW_THETA = 10000.0  # default base of the rotary embedding of layers with a window


def read_gemma3(config: ModelConfig) -> ModelSpec:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(key):
            raise config.unsupported(
                f"{key} is {config.number(key):g}; limits of scores by tanh are not supported"
            )
    if config.flag("use_bidirectional_attention", False):
        raise config.unsupported(
            "use_bidirectional_attention is true; tokens see earlier ones only"
        )
    spec = read_decoder(config, ropes_by_type=True)
    has_bias = config.flag("attention_bias", False)
    theta = config.positive("rope_local_base_freq", WINDOW_THETA)
    return replace(
        spec,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        has_output_norms=True,
        norm_adds_one=True,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        other_rope=LayerRope(
            read_window_rope(config, spec.head_dim, theta), sliding_layers(config)
        ),
        names=NAMES,
    )
