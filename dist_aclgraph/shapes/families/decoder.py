"""The keys of config.json that all families share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_facts import facts_of
from dist_aclgraph.shapes.model_spec import (
    Activation,
    ExpertSpec,
    LatentSpec,
    LayerRope,
    ModelSpec,
)
from dist_aclgraph.shapes.rope_spec import UNROTATED, read_rope_spec, read_rotary_dim


def read_decoder(
    config: ModelConfig,
    *,
    experts: ExpertSpec | None = None,
    latent: LatentSpec | None = None,
    rotated_part: float | None = None,
    num_draft_layers: int = 0,
    ropes_by_type: bool = False,
    activations: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh"),
) -> ModelSpec:
    """Return the shape of a decoder without biases and without norms of q and k.

    Args:
        rotated_part: the default fraction of a head's elements that is rotated, for a config.json
            without this value. None means that the family rotates whole heads.
        num_draft_layers: number of next-token modules whose weights the family publishes.
        ropes_by_type: whether layers with a window may have a separate rotary embedding.
        activations: activations that the family may have; the first activation is the family's
            default.

    Raises:
        ModelError: a key is missing, or has an impossible value.
        UnsupportedModelError: the rope scaling is not implemented.
    """
    facts = replace(
        facts_of(config),
        vocab_size=config.integer("vocab_size"),
        experts=experts,
        num_draft_layers=num_draft_layers,
    )
    has_mlps = experts is None or not experts.layers.issuperset(range(facts.num_layers))
    rotary_dim = None
    if rotated_part is not None:
        rotary_dim = read_rotary_dim(config, facts.head_dim, rotated_part)
    rope_dim = latent.rope_dim if latent else rotary_dim or facts.head_dim
    return ModelSpec(
        **vars(facts),
        intermediate_size=config.integer("intermediate_size", None if has_mlps else 1),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        rope=read_rope_spec(
            config, rope_dim, rotates_part=rotary_dim is not None, by_type=ropes_by_type
        ),
        latent=latent,
        rotary_dim=rotary_dim,
        activation=_activation(config, activations),
    )


def without_rope(spec: ModelSpec, layers: Iterable[int]) -> ModelSpec:
    """Return a decoder in which some layers rotate neither queries nor keys."""
    unrotated = frozenset(layers)
    if not unrotated:
        return spec
    rope = replace(spec.rope, kind=UNROTATED, query_growth=0.0)
    return replace(spec, other_rope=LayerRope(rope, unrotated))


def _activation(config: ModelConfig, known: tuple[Activation, ...]) -> Activation:
    name = config.text("hidden_act", known[0])
    for activation in known:
        if name == activation:
            return activation
    raise config.unsupported(f"hidden_act {name:.80} is not supported; only {', '.join(known)}")
