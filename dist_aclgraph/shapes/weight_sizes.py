"""Bytes of a decoder's weights on one rank, part by part, computed from its shape alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.int4_formats import Int4Part
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

NORMS_OF_NEXT_TOKEN = 3  # for the token's embedding, the hidden state and the head
FLOAT32_BYTES = 4
EXPERTS = "experts"


class WeightPart(NamedTuple):
    """Weights of one kind on one rank."""

    name: str
    bytes: int


class _Elements(NamedTuple):
    """Numbers of elements: of matrices that may be quantised, of values that are always float32,
    and of all other weights.
    """

    matrices: int
    others: int = 0
    floats: int = 0


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
        ep: 1 if every expert is split over the tensor parallel ranks; else a rank has whole
            experts.
        matrix_bytes: bytes of an element of the layers' matrices, if they are quantised to int8.
            The scales, one for each output, are not counted. Matrices that have four bits in the
            checkpoint keep them.
        drafts: whether the next-token module is counted; it shares the decoder's embedding and
            head.
        redundant_experts: number of additional copies of experts on all ``ep`` ranks together.
    """
    sizes = _Sizes(element_bytes, matrix_bytes or element_bytes, {p.name: p for p in spec.int4})
    indices = range(spec.num_layers + (1 if drafts else 0))
    attention = _latent_attention(spec, spec.latent, tp) if spec.latent else _attention(spec, tp)
    num_linear = 0 if spec.linear is None else len(spec.linear.layers)
    norms = _Elements(0, 2 * spec.hidden_size)
    has_experts = [spec.experts is not None and i in spec.experts.layers for i in indices]
    num_dense, num_sparse = has_experts.count(False), has_experts.count(True)
    found = [
        _part("embedding and head", _vocabulary(spec, tp), 1, sizes),
        _part("attention", attention, len(indices) - num_linear, sizes),
        _part("norms", norms, len(indices), sizes),
        _part("dense MLPs", _mlp(spec.hidden_size, spec.intermediate_size, tp), num_dense, sizes),
    ]
    if spec.linear is not None:
        linear = _linear_attention(spec, spec.linear, tp)
        found.append(_part("linear attention", linear, num_linear, sizes))
    if spec.indexer is not None:
        num_indexers = len(spec.indexer.layers.intersection(indices))
        found.append(_part("indexers", _indexer(spec, spec.indexer), num_indexers, sizes))
    if spec.experts is not None:
        routed, shared, router = _experts(spec.hidden_size, spec.experts, tp, ep, redundant_experts)
        found += [
            _part(EXPERTS, routed, num_sparse, sizes),
            _part("shared experts", shared, num_sparse, sizes),
            _part("routers", router, num_sparse, sizes),
        ]
        if offsets := _offsets(routed, sizes):
            found.append(WeightPart("offsets of experts", offsets))
    if drafts:
        hidden = spec.hidden_size
        mix = _Elements(0, 2 * hidden * hidden + NORMS_OF_NEXT_TOKEN * hidden)
        found.append(_part("mix of the next-token module", mix, 1, sizes))
    return tuple(part for part in found if part.bytes)


class _Sizes(NamedTuple):
    """Bytes of an element of most weights; bytes of an element of a matrix that does not have four
    bits; the parts whose matrices have four bits.
    """

    element: int
    matrix: int
    int4: Mapping[str, Int4Part]


def _part(name: str, elements: _Elements, copies: int, sizes: _Sizes) -> WeightPart:
    one = elements.others * sizes.element + elements.floats * FLOAT32_BYTES
    total, wide = copies * one, copies
    if (int4 := sizes.int4.get(name)) is not None:
        narrow = min(copies, int4.num_layers)
        each = int4.form.bytes_each(has_experts=name == EXPERTS)
        total, wide = total + round(narrow * elements.matrices * each), copies - narrow
    return WeightPart(name, total + wide * elements.matrices * sizes.matrix)


def _offsets(routed: _Elements, sizes: _Sizes) -> int:
    """Return the bytes of the zeros that all layers of experts share if rows are floats. There is
    one zero for each scale of gate and up.
    """
    int4 = sizes.int4.get(EXPERTS)
    if int4 is None or int4.form.quantises_rows or int4.form.group is None:
        return 0
    gate_up = 2 * routed.matrices // 3
    return gate_up // int4.form.group * sizes.element


def _vocabulary(spec: ModelSpec, tp: int) -> _Elements:
    rows = -(-spec.vocab_size // tp)
    copies = 1 if spec.tie_word_embeddings else 2
    return _Elements(0, copies * rows * spec.hidden_size + spec.hidden_size)


def _attention(spec: ModelSpec, tp: int) -> _Elements:
    hidden, d = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads // tp * d, kv_heads_per_rank(spec.num_kv_heads, tp) * d
    others = (q + 2 * kv) * spec.has_qkv_bias + hidden * spec.has_output_bias
    if spec.has_qk_norm:
        others += q + kv if spec.qk_norm_spans_heads else 2 * d
    if spec.has_sinks:
        others += spec.num_heads // tp
    gate = q * spec.has_output_gate
    return _Elements(hidden * (2 * q + gate + 2 * kv), others)


def _linear_attention(spec: ModelSpec, linear: LinearSpec, tp: int) -> _Elements:
    hidden, values = spec.hidden_size, linear.num_value_heads // tp
    channels, width = linear.num_channels // tp, values * linear.value_dim
    if linear.decays_by_channel:
        # Products of inputs, of beta and of the result. Then the two factors of the products of
        # decays and of gates; the first factor is not split over ranks.
        matrices = hidden * (channels + values + width)
        matrices += (hidden + width) * (linear.key_dim + linear.value_dim)
        floats = channels * linear.conv_width + values + width
        return _Elements(matrices, linear.value_dim, floats)
    # Products of inputs, of the gates z, of b and a, and of the result.
    matrices = hidden * (channels + 2 * width + 2 * values)
    floats = channels * linear.conv_width + 2 * values  # convolution, decay and its bias
    return _Elements(matrices, linear.value_dim, floats)


def _latent_attention(spec: ModelSpec, latent: LatentSpec, tp: int) -> _Elements:
    hidden, heads = spec.hidden_size, spec.num_heads // tp
    query = heads * (latent.plain_dim + latent.rope_dim)
    matrices = hidden * (latent.kv_rank + latent.rope_dim)  # not split over ranks
    matrices += heads * latent.value_dim * hidden
    # The matrices that multiply the latent are stacks, one matrix for each head; they are never
    # quantised.
    others = heads * latent.kv_rank * (latent.plain_dim + latent.value_dim) + latent.kv_rank
    if latent.q_rank is None:
        return _Elements(matrices + hidden * query, others)
    return _Elements(
        matrices + hidden * latent.q_rank + latent.q_rank * query, others + latent.q_rank
    )


def _indexer(spec: ModelSpec, indexer: IndexerSpec) -> _Elements:
    """Return the elements of an indexer, which is not split over ranks."""
    assert spec.latent is not None and spec.latent.q_rank is not None
    heads, d = indexer.num_heads, indexer.head_dim
    # Query matrix and key matrix; then the weights of heads, and the norm of keys with its bias.
    return _Elements(
        spec.latent.q_rank * heads * d + spec.hidden_size * d, spec.hidden_size * heads + 2 * d
    )


def _mlp(hidden: int, width: int, tp: int) -> _Elements:
    return _Elements(3 * hidden * -(-width // tp))


def _experts(
    hidden: int, experts: ExpertSpec, tp: int, ep: int, redundant: int
) -> tuple[_Elements, _Elements, _Elements]:
    """Return the elements of a layer's routed experts, of its shared experts, and of its router."""
    count, width = experts.num_experts, -(-experts.width // tp)
    if ep > 1:
        count, width = (experts.num_experts + redundant) // ep, experts.width
    routed, biases = count * 3 * hidden * width, count * (2 * width + hidden)
    shared = _mlp(hidden, experts.width_of_shared, tp)._replace(
        others=hidden * experts.gates_shared
    )
    router = (hidden + experts.has_bias + experts.has_product_biases) * experts.num_experts
    # The operator needs biases in float32 if weights are bfloat16.
    floats = biases if experts.has_product_biases else 0
    return _Elements(routed, floats=floats), shared, _Elements(0, floats=router)
