"""Bytes of a decoder's weights on one rank, part by part, computed from its shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.int4_formats import Int4Matrix
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.matrices import (
    ATTENTION,
    DENSE,
    EACH_EXPERT,
    EXPERTS,
    INDEXERS,
    LINEAR,
    SHARED,
    Elements,
    Part,
    experts_per_rank,
    has_part,
    matrices_of,
)
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

NORMS_OF_NEXT_TOKEN = 3  # norms of the embedding, of the hidden state, and of the head's input
FLOAT32_BYTES = 4
NO_MATRICES: Elements = {}


class WeightPart(NamedTuple):
    """Weights of one kind on one rank."""

    name: str
    bytes: int


class _Others(NamedTuple):
    """Numbers of elements of the weights that ``matrices_of`` does not list.

    Attributes:
        usual: number of elements that have the type of most weights.
        floats: number of elements in float32.
    """

    usual: int = 0
    floats: int = 0


class _Sizes(NamedTuple):
    """The sizes of elements.

    Attributes:
        element: bytes of one element of most weights.
        matrix: bytes of one element of a layer's matrix, if the matrix is not in ``int4``.
        int4: the matrices that have four bits.
    """

    element: int
    matrix: int
    int4: Sequence[Int4Matrix]


def weight_parts(
    spec: ModelSpec,
    *,
    tp: int,
    ep: int,
    element_bytes: int,
    matrix_bytes: int | None = None,
    drafts: bool = False,
    redundant_experts: int = 0,
) -> tuple[WeightPart, ...]:
    """Return the parts of the weights on one rank, with their bytes.

    Args:
        ep: expert parallel size. With 1, every expert is split over the tensor parallel ranks. With
            a larger size, each rank has whole experts.
        matrix_bytes: bytes of an element of the layers' matrices, if these matrices are quantised
            to int8. None means ``element_bytes``. The scales, one for each output, are not counted.
            Matrices that have four bits in the checkpoint keep four bits.
        drafts: whether the next-token module is counted. The module shares embedding and head with
            the decoder.
        redundant_experts: number of additional copies of experts on all ``ep`` ranks together.
    """
    sizes = _Sizes(element_bytes, matrix_bytes or element_bytes, spec.int4)
    matrices = matrices_of(spec, tp=tp, ep=ep, redundant_experts=redundant_experts)
    others = {
        ATTENTION: _of_latent(spec, spec.latent, tp) if spec.latent else _of_attention(spec, tp),
        DENSE: _of_mlp(spec, tp),
    }
    if spec.linear is not None:
        others[LINEAR] = _of_linear(spec.linear, tp)
    if spec.indexer is not None:
        others[INDEXERS] = _of_indexer(spec.hidden_size, spec.indexer)
    if spec.experts is not None:
        others[EXPERTS] = _of_experts(spec.hidden_size, spec.experts, tp, ep, redundant_experts)
        others[SHARED] = _Others(spec.hidden_size * spec.experts.gates_shared)
    num_layers = spec.num_layers + (1 if drafts else 0)
    found = [
        _part("embedding and head", NO_MATRICES, _vocabulary(spec, tp), 1, sizes),
        _part(
            "norms",
            NO_MATRICES,
            _Others(spec.num_layer_norms * spec.hidden_size),
            num_layers,
            sizes,
        ),
    ]
    for part, each in matrices.items():
        count = sum(has_part(spec, part, index) for index in range(num_layers))
        found.append(_part(part, each, others.get(part, _Others()), count, sizes))
        if part == EXPERTS and spec.experts is not None:
            found.append(
                _part("routers", NO_MATRICES, _router(spec.hidden_size, spec.experts), count, sizes)
            )
            found.append(WeightPart("offsets of experts", _offsets(each, sizes)))
    if drafts:
        hidden = spec.hidden_size
        mix = _Others(2 * hidden * hidden + NORMS_OF_NEXT_TOKEN * hidden)
        found.append(_part("mix of the next-token module", NO_MATRICES, mix, 1, sizes))
    return tuple(part for part in found if part.bytes)


def _part(
    name: Part, matrices: Elements, others: _Others, copies: int, sizes: _Sizes
) -> WeightPart:
    """Return a part of the weights, with its bytes in all ``copies`` layers that have this part."""
    total = float(copies * (others.usual * sizes.element + others.floats * FLOAT32_BYTES))
    for matrix, elements in matrices.items():
        wide = float(copies)
        for int4 in sizes.int4:
            if (int4.part, int4.name) == (name, matrix):
                each = int4.form.bytes_each(has_experts=name == EXPERTS)
                total += int4.num_layers * elements * each
                wide -= int4.num_layers
        total += wide * elements * sizes.matrix
    return WeightPart(name, round(total))


def _offsets(experts: Elements, sizes: _Sizes) -> int:
    """Return the bytes of the offsets of quantised experts. The operator requires offsets if its
    input rows are floats.

    Each scale of the gate and up matrices has an offset. All offsets are zero, so all layers of
    experts share one tensor.
    """
    groups = (
        2 * experts[int4.name] // int4.form.group
        for int4 in sizes.int4
        if int4.name == f"{EACH_EXPERT}.gate_proj"
        and int4.form.group is not None
        and not int4.form.quantises_rows
    )
    return max(groups, default=0) * sizes.element


def _vocabulary(spec: ModelSpec, tp: int) -> _Others:
    rows = -(-spec.vocab_size // tp)
    copies = 1 if spec.tie_word_embeddings else 2
    return _Others(copies * rows * spec.hidden_size + spec.hidden_size)


def _of_attention(spec: ModelSpec, tp: int) -> _Others:
    hidden, d = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads // tp * d, kv_heads_per_rank(spec.num_kv_heads, tp) * d
    usual = (q + 2 * kv) * spec.has_qkv_bias + hidden * spec.has_output_bias
    if spec.has_qk_norm:
        usual += q + kv if spec.qk_norm_spans_heads or spec.norms_center else 2 * d
    if spec.has_sinks:
        usual += spec.num_heads // tp
    return _Others(usual)


def _of_mlp(spec: ModelSpec, tp: int) -> _Others:
    width = -(-spec.intermediate_size // tp)
    return _Others(((1 + spec.gates_mlp) * width + spec.hidden_size) * spec.has_mlp_bias)


def _of_latent(spec: ModelSpec, latent: LatentSpec, tp: int) -> _Others:
    # Each head has one matrix that multiplies the latent. These matrices are stored as one tensor,
    # which is never quantised.
    heads = spec.num_heads // tp
    stacks = heads * latent.kv_rank * (latent.plain_dim + latent.value_dim)
    return _Others(stacks + latent.kv_rank + (latent.q_rank or 0))


def _of_linear(linear: LinearSpec, tp: int) -> _Others:
    values, channels = linear.num_value_heads // tp, linear.num_channels // tp
    # The elements in float32 are the weights of the convolution, the decay of each head, and the
    # biases of the decays.
    biases = values * linear.value_dim if linear.decays_by_channel else values
    return _Others(linear.value_dim, channels * linear.conv_width + values + biases)


def _of_indexer(hidden: int, indexer: IndexerSpec) -> _Others:
    # The first summand is the matrix that computes the weights of the index heads. The second
    # summand is the norm of index keys, with its bias.
    return _Others(hidden * indexer.num_heads + 2 * indexer.head_dim)


def _of_experts(hidden: int, experts: ExpertSpec, tp: int, ep: int, redundant: int) -> _Others:
    if not experts.has_product_biases:
        return _Others()
    count, width = experts_per_rank(experts, tp, ep, redundant)
    # The operator needs biases in float32 if weights are bfloat16.
    return _Others(floats=count * (2 * width + hidden))


def _router(hidden: int, experts: ExpertSpec) -> _Others:
    rows = hidden + experts.has_bias + experts.has_product_biases
    return _Others(floats=rows * experts.num_experts)
