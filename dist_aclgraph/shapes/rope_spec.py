"""The rotary embedding of a checkpoint, and the lengths of requests that its scaling allows.

The keys of config.json and their precedence are the same as in transformers. Lengths are derived as
in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.model_config import (
    FULL_ATTENTION,
    MAX_CONTEXT,
    ROPE_ORIGINAL,
    SLIDING_ATTENTION,
    ModelConfig,
)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# In these architectures, max_position_embeddings is the context length after the scaling. vLLM
# assumes the same.
COUNTS_SCALING = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# Types of scaling in which the frequencies depend on the length of the longest possible request.
BY_LENGTH = ("dynamic", "longrope")
# value of this key: ``RopeSpec.query_growth``
QUERY_GROWTH = "llama_4_scaling_beta"
STRETCH = "alpha"  # Hunyuan's key for a factor that changes the base
# The value of this key divides the frequencies among three positions: time, row and column in an
# image.
MROPE_SECTION = "mrope_section"
UNROTATED = "none"  # the kind of an embedding that rotates no element of a head


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: its base, the rotated part of a head, and the scaling for long contexts.

    Attributes:
        max_position_embeddings: the value in config.json, not scaled.
        original_max_position_embeddings: context length before the scaling; None means
            ``max_position_embeddings``.
        query_growth: a query at position p is multiplied by ``1 + query_growth * log(1 + floor(p /
            original_len))``.
        short_factors, long_factors: longrope's divisors of each frequency. The short factors are
            for deployments whose longest request fits into the original context. The long factors
            are for all other deployments.
    """

    theta: float
    kind: str  # one of ROPE_TYPES, or UNROTATED
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    query_growth: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def original_len(self) -> int:
        """Context length before the scaling."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def num_tables(self) -> int:
        """Number of tables for grouped queries and keys: 2 if queries and keys have separate
        tables, 1 if both share a table, 0 if nothing is rotated.
        """
        if self.query_growth:
            return 2
        return 0 if self.kind == UNROTATED else 1


@dataclass(frozen=True)
class ContextLengths:
    """Lengths of requests: prompt plus output, in tokens.

    Attributes:
        longest: length of the longest request that the model supports.
        usual: default of ``max_model_len``. The default is shorter than ``longest`` if a larger
            ``max_model_len`` would change the rotary embedding even for short requests.
    """

    longest: int
    usual: int


def read_rope_spec(
    config: ModelConfig,
    rope_dim: int,
    *,
    rotates_part: bool = False,
    by_type: bool = False,
) -> RopeSpec:
    """Read the rotary embedding of a supported decoder.

    Args:
        rope_dim: number of rotated elements of a head.
        rotates_part: whether the family may rotate only a part of a head, see ``read_rotary_dim``.
        by_type: whether layers with a window may have a separate embedding, which
            ``read_window_rope`` reads. In such a family, transformers ignores ``rope_parameters``
            if this object has no inner object for each type of layer. A checkpoint is refused if
            the ignored values would change the embedding.

    Raises:
        ModelError: a key is missing, or has an impossible value.
        UnsupportedModelError: the scaling is not implemented.
    """
    if config.separate_ropes is not None and not by_type:
        raise config.unsupported(
            "rope_parameters has separate embeddings for types of layers, which are not supported "
            f"in a {config.architecture}"
        )
    partial = _rotated_part(config, 1.0)
    if partial != 1.0 and not rotates_part:
        raise config.unsupported(
            f"partial_rotary_factor is {partial:g}; partial rotary embeddings are not supported"
        )
    theta = config.positive("rope_theta", 10000.0)
    spec = _read(config, config.rope, rope_dim, theta)
    if by_type and config.separate_ropes is None:
        older = config.part("rope_scaling") or config.empty_part()
        if spec != _read(config, older, rope_dim, theta):  # transformers reads only ``older``
            raise config.unsupported(
                "rope_parameters has no object for each type of layer, so transformers ignores its "
                f"{', '.join(sorted(config.rope.raw))[:80]}; move them into an object "
                f"{FULL_ATTENTION} of rope_parameters, or set model_overrides.rope_scaling"
            )
    return spec


def read_window_rope(config: ModelConfig, rope_dim: int, theta: float) -> RopeSpec:
    """Read the rotary embedding of layers with a window, for families in which these layers have a
    separate embedding.

    Args:
        theta: base of the embedding if config.json has no other value.

    Raises:
        ModelError: a key has an impossible value.
        UnsupportedModelError: the scaling is not implemented.
    """
    separate = config.separate_ropes or config.empty_part()
    scaling = separate.part(SLIDING_ATTENTION) or config.empty_part()
    return _read(config, scaling, rope_dim, theta)


def _read(config: ModelConfig, scaling: ModelConfig, rope_dim: int, theta: float) -> RopeSpec:
    kind = _kind(scaling)
    if kind not in ROPE_TYPES:
        raise config.unsupported(
            f"rope scaling {kind:.80} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    optional = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    given = (key for key in optional if scaling.has(key))
    numbers: dict[str, Any] = {key: scaling.number(key) for key in (*needed, *given)}
    return RopeSpec(
        theta=_stretched(scaling, rope_dim, scaling.positive("rope_theta", theta)),
        kind=kind,
        max_position_embeddings=config.integer("max_position_embeddings", most=MAX_CONTEXT),
        factor=_factor(config, scaling),
        original_max_position_embeddings=(
            _original_len(config, scaling)
            if config.has(ROPE_ORIGINAL) or scaling.has(ROPE_ORIGINAL)
            else None
        ),
        truncate=scaling.flag("truncate", True),
        query_growth=scaling.number(QUERY_GROWTH, 0.0),
        short_factors=_factors(scaling, "short_factor", rope_dim) if kind == "longrope" else (),
        long_factors=_factors(scaling, "long_factor", rope_dim) if kind == "longrope" else (),
        **numbers,
    )


def read_rotary_dim(config: ModelConfig, head_dim: int, usual_part: float) -> int:
    """Return the number of rotated elements of a head, for families that rotate only a part of a
    head.

    Args:
        usual_part: fraction of the elements that is rotated, if config.json has no value.

    Raises:
        ModelError: the number of rotated elements is not an even number from 2 to ``head_dim``.
    """
    part = _rotated_part(config, usual_part)
    dim = int(head_dim * part) if 0 < part <= 1 else 0
    if dim < 2 or dim % 2:
        raise ModelError(
            f"{config.path}: partial_rotary_factor is {part:g}; it must select an even number of "
            f"the {head_dim} elements of a head"
        )
    return dim


def read_context_lengths(config: ModelConfig) -> ContextLengths:
    """Read the lengths of requests that a model of any architecture allows.

    Raises:
        ModelError: a key is missing, or has an impossible value.
    """
    scaling, length = config.rope, config.max_position_embeddings
    kind = _kind(scaling)
    if kind == "longrope":
        return ContextLengths(length, min(length, _original_len(config, scaling)))
    if kind in ("linear", "dynamic", "yarn") and config.architecture not in COUNTS_SCALING:
        start = _original_len(config, scaling) if kind == "yarn" else length
        # If a yarn model's factor is too small for the length that config.json declares, the
        # declared length is used. vLLM uses the shorter length.
        length = max(length, int(start * _factor(config, scaling)))
        if length > MAX_CONTEXT:
            raise ModelError(
                f"{config.path}: {start} tokens and the factor of rope scaling give a context of "
                f"{length} tokens; at most {MAX_CONTEXT}"
            )
    return ContextLengths(length, length)


def depends_on_length(config: ModelConfig) -> bool:
    """Whether the embedding depends on the length of the longest possible request."""
    return _kind(config.rope) in BY_LENGTH


def _rotated_part(config: ModelConfig, usual: float) -> float:
    beside = config.number("partial_rotary_factor", usual)
    return config.rope.number("partial_rotary_factor", beside)


def _kind(scaling: ModelConfig) -> str:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    # early Phi-3 files name longrope "su" or "yarn"
    is_longrope = kind == "su" or (kind == "yarn" and scaling.has("short_factor"))
    if kind == "mrope" and scaling.has(MROPE_SECTION):
        return "default"  # a text token has the same time, row and column position
    if kind == "dynamic" and scaling.has(STRETCH):
        return "default"  # this scaling changes only the base, and does not depend on lengths
    return "longrope" if is_longrope else kind


def _stretched(scaling: ModelConfig, rope_dim: int, theta: float) -> float:
    """Return the base of the frequencies. Hunyuan's factor in config.json, if there is one, changes
    this base.
    """
    if not scaling.has(STRETCH):
        return theta
    return float(theta * scaling.positive(STRETCH) ** (rope_dim / (rope_dim - 2)))


def _original_len(config: ModelConfig, scaling: ModelConfig) -> int:
    """Return the context length before the scaling. The key at config.json's top level takes
    precedence over the same key in the object that describes the scaling.
    """
    holder = config if config.has(ROPE_ORIGINAL) else scaling
    return holder.integer(ROPE_ORIGINAL, config.max_position_embeddings, least=2, most=MAX_CONTEXT)


def _factor(config: ModelConfig, scaling: ModelConfig) -> float:
    kind = _kind(scaling)
    if kind in ("yarn", "longrope"):
        implied = config.max_position_embeddings / _original_len(config, scaling)
        return scaling.positive("factor", implied)
    return 1.0 if kind == "default" else scaling.positive("factor")


def _factors(scaling: ModelConfig, key: str, rope_dim: int) -> tuple[float, ...]:
    values = scaling.positive_numbers(key)
    if len(values) != rope_dim // 2:
        raise ModelError(
            f"{scaling.path}: {key} has {len(values)} numbers; a head has {rope_dim // 2} "
            "frequencies"
        )
    return values
