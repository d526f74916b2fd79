"""Checks whether a model's matrices of four bits can be divided among the ranks of a layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dist_aclgraph.config import ParallelConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.int4_formats import EXPERT_INPUTS, INT8_GROUP, SMALLEST_GROUP, Int4Format
from dist_aclgraph.shapes.matrices import ATTENTION, DENSE, EXPERTS, INDEXERS, LINEAR, SHARED
from dist_aclgraph.shapes.model_spec import ModelSpec

# Matrices with these endings have inputs other than the hidden states.
OF_INNER = ("o_proj", "down_proj", "out_proj", "_b_proj", "wq_b")
WORD = 8  # an int32 stores the values of eight consecutive outputs


def check_int4_shares(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Check that the operators accept each rank's part of the matrices.

    Raises:
        ConfigError: the operators refuse a part; the message names width, part and remedy.
    """
    for matrix in spec.int4:
        part, form = matrix.part, matrix.form
        widths = [
            (inner.width, inner.num_ranks)
            for inner in _inner_widths(spec, parallel)
            if inner.part == part and matrix.name.endswith(inner.ending)
        ]
        inputs = [width for width, _ in widths]
        takes_hidden = not matrix.name.endswith(OF_INNER)
        if takes_hidden:
            inputs.append(spec.hidden_size)
        if form.group and (odd := [width for width in inputs if width % form.group]):
            raise ConfigError(
                f"{part} with values of four bits have {odd[0]} inputs in groups of "
                f"{form.group}, and the last group would be shorter: quantise the checkpoint "
                "with a group size that divides the inputs"
            )
        if takes_hidden:
            _check_hidden_size(spec.hidden_size, part, _factor(form, has_experts=part == EXPERTS))
        for width, num_ranks in widths:
            share, factor = -(-width // num_ranks), _factor(form, has_experts=part == EXPERTS)
            if share % factor:
                remedy = "choose another parallel.tp"
                if part == EXPERTS:
                    remedy += ", or set parallel.ep"
                if num_ranks == 1:
                    remedy = "keep these matrices in floats when you quantise the checkpoint"
                raise ConfigError(
                    f"parallel.tp is {parallel.tp}, and {part} with values of four bits have an "
                    f"inner width of {width}, {share} on each rank; this must be a multiple of "
                    f"{factor}: {remedy}"
                )


def _check_hidden_size(width: int, part: str, factor: int) -> None:
    """Check that the operators accept matrices whose inputs are the hidden states.

    Raises:
        ConfigError: the number of inputs is not a multiple of ``factor``.
    """
    if width % factor:
        raise ConfigError(
            f"{part} with values of four bits have {width} inputs, the hidden size; this must be "
            f"a multiple of {factor}: keep these matrices in floats when you quantise the "
            "checkpoint"
        )


class _Inner(NamedTuple):
    """A width inside a layer, such as the MLP's inner width. It is the number of inputs of some
    matrices, and the number of outputs of other matrices.

    Attributes:
        ending: end of the names of the matrices with this width. "" means all matrices of the part.
        num_ranks: number of ranks among which the width is divided.
    """

    part: str
    width: int
    num_ranks: int
    ending: str = ""


def _inner_widths(spec: ModelSpec, parallel: ParallelConfig) -> Iterator[_Inner]:
    tp, experts, latent, linear = parallel.tp, spec.experts, spec.latent, spec.linear
    yield _Inner(ATTENTION, spec.num_heads * (latent.value_dim if latent else spec.head_dim), tp)
    if latent is not None and latent.q_rank is not None:
        yield _Inner(ATTENTION, latent.q_rank, 1, "q_b_proj")
        yield _Inner(INDEXERS, latent.q_rank, 1, "wq_b")
    if linear is not None:
        width = linear.num_value_heads * linear.value_dim
        yield _Inner(LINEAR, width, tp, "o_proj" if linear.decays_by_channel else "out_proj")
        yield _Inner(LINEAR, linear.key_dim, 1, "f_b_proj")
        yield _Inner(LINEAR, linear.value_dim, 1, "g_b_proj")
    yield _Inner(DENSE, spec.intermediate_size, tp)
    if experts is not None:
        yield _Inner(EXPERTS, experts.width, tp if parallel.ep == 1 else 1)
        yield _Inner(SHARED, experts.width_of_shared, tp)


def _factor(form: Int4Format, *, has_experts: bool) -> int:
    if not form.quantises_rows:
        return WORD if form.group is None else SMALLEST_GROUP
    return EXPERT_INPUTS if has_experts and form.group is None else INT8_GROUP
