"""Checks whether the ranks of a layout can share a model's matrices of four bits."""

from __future__ import annotations

from collections.abc import Iterator

from dist_aclgraph.config.tree import ParallelConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.int4_formats import EXPERT_INPUTS, INT8_GROUP, SMALLEST_GROUP, Int4Format
from dist_aclgraph.shapes.matrices import ATTENTION, DENSE, EXPERTS, SHARED
from dist_aclgraph.shapes.model_spec import ModelSpec

WORD = 8  # number of values in an int32, for consecutive outputs


def check_int4_shares(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Check that the operators accept each rank's part of the matrices.

    Raises:
        ConfigError: the operators refuse a part; the message names width, part and remedy.
    """
    widths = dict(_inner_widths(spec, parallel))
    forms = dict.fromkeys((matrix.part, matrix.form) for matrix in spec.int4)
    for part, form in forms:
        inner = (spec.hidden_size, widths.get(part, (0, 1))[0])
        if form.group and (odd := [width for width in inner if width % form.group]):
            raise ConfigError(
                f"{part} with values of four bits have {odd[0]} inputs in groups of "
                f"{form.group}, and the last group would be shorter: quantise the checkpoint "
                "with a group size that divides the inputs"
            )
        if part not in widths:
            continue
        width, size = widths[part]
        share, factor = -(-width // size), _factor(form, has_experts=part == EXPERTS)
        if share % factor:
            spread = ", or set parallel.ep" if part == EXPERTS and size > 1 else ""
            raise ConfigError(
                f"parallel.tp is {parallel.tp}, and {part} with values of four bits have an "
                f"inner width of {width}, {share} on each rank; this must be a multiple of "
                f"{factor}: choose another parallel.tp{spread}"
            )


def _inner_widths(
    spec: ModelSpec, parallel: ParallelConfig
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the inner width of each part, and the number of ranks that share it."""
    tp, experts = parallel.tp, spec.experts
    value_dim = spec.latent.value_dim if spec.latent else spec.head_dim
    yield ATTENTION, (spec.num_heads * value_dim, tp)
    yield DENSE, (spec.intermediate_size, tp)
    if experts is not None:
        yield EXPERTS, (experts.width, tp if parallel.ep == 1 else 1)
        yield SHARED, (experts.width_of_shared, tp)


def _factor(form: Int4Format, *, has_experts: bool) -> int:
    if not form.quantises_rows:
        return WORD if form.group is None else SMALLEST_GROUP
    return EXPERT_INPUTS if has_experts and form.group is None else INT8_GROUP
