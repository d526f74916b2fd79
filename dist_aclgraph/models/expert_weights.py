"""Loads the experts of a layer.

With expert parallelism, a rank loads some of the experts as a whole. Other ranks can have copies of
the same experts. Without expert parallelism, each expert's inner width is split over the tensor
parallel group. Shared experts are always split in this way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_aclgraph.layers.experts import ExpertLayer
from dist_aclgraph.layers.local_experts import (
    ActivatedProduct,
    ClippedSwiglu,
    ExpertProduct,
    LocalExperts,
)
from dist_aclgraph.layers.router import ExpertCopies, Router
from dist_aclgraph.layers.shared_experts import SharedExperts
from dist_aclgraph.layers.token_exchange import make_exchanges
from dist_aclgraph.models.loading import MatrixPart, WeightSlices
from dist_aclgraph.models.stacked_experts import load_joined_products, load_stacked_products
from dist_aclgraph.planning.expert_placement import ExpertPlacement, place_experts
from dist_aclgraph.shapes.model_spec import ExpertSpec


def load_experts(
    slices: WeightSlices, experts: ExpertSpec, hidden: int, prefix: str
) -> ExpertLayer:
    """Return this rank's experts, or this rank's part of all experts. Nothing else is read.

    Args:
        hidden: width of the layer's input and output.
        prefix: beginning of the weights' names, such as ``model.layers.3.mlp``.

    Raises:
        ConfigError: the experts cannot be divided among the ranks.
    """
    setup, ep = slices.experts, slices.experts.groups.ep
    placement = place_experts(experts.num_experts, ep.size, setup.redundant)
    share = slices.share(experts.width) if ep.size == 1 else (0, experts.width)
    here = placement.ranks[ep.rank]
    load = _load_products
    if experts.is_stacked:
        load = load_stacked_products
    elif slices.has(f"{prefix}.experts.gate_up_proj"):  # gate and up are stored as one matrix
        load = load_joined_products
    gate_up, down = load(slices, experts, hidden, f"{prefix}.experts", here, share)
    clip = experts.clip
    local = LocalExperts(
        slices.inner_product(gate_up, down)
        if clip is None
        else ActivatedProduct(gate_up, ClippedSwiglu(clip.alpha, clip.limit)),
        down,
        ep.rank * placement.per_rank,
        placement.num_slots,
        gate_up.quantises_rows and slices.fusions.use("routing_quant", hidden),
    )
    return ExpertLayer(
        _load_router(slices, experts, hidden, f"{prefix}.gate", placement),
        local,
        setup.groups,
        make_exchanges(setup.groups, local, setup.capacity_factor, setup.mc2),
        _load_shared(slices, experts, hidden, prefix),
    )


def _load_products(
    slices: WeightSlices,
    experts: ExpertSpec,
    hidden: int,
    prefix: str,
    here: Sequence[int],
    share: tuple[int, int],
) -> tuple[ExpertProduct, ExpertProduct]:
    """Return two products for the experts in ``here``: one for gate and up, and one for down."""
    names, sizes = [f"{prefix}.{expert}" for expert in here], (hidden, experts.width, share)
    gate_up = slices.expert_product([_gate_up(slices, name, *sizes) for name in names])
    return gate_up, slices.expert_product([_down(slices, name, *sizes) for name in names])


def _load_router(
    slices: WeightSlices,
    experts: ExpertSpec,
    hidden: int,
    prefix: str,
    placement: ExpertPlacement,
) -> Router:
    read, count = slices.checkpoint.read_float32, experts.num_experts
    bias = logit_bias = None
    if experts.has_product_biases:
        logit_bias = slices.place(read(f"{prefix}.bias", (count,)))
    if experts.has_bias:
        shape = (1, count) if experts.bias_is_row else (count,)
        bias = slices.place(read(f"{prefix}.e_score_correction_bias", shape).flatten())
    return Router(
        slices.place(read(f"{prefix}.weight", (count, hidden)).t()),
        experts.top_k,
        experts.renormalizes,
        scoring=experts.scoring,
        bias=bias,
        num_groups=experts.num_groups,
        top_groups=experts.top_groups,
        group_score=experts.group_score,
        scale=experts.scaling,
        copies=_load_copies(slices, placement),
        logit_bias=logit_bias,
    )


def _load_copies(slices: WeightSlices, placement: ExpertPlacement) -> ExpertCopies | None:
    """Return, for each expert, the slots of its copies. Return None if every expert exists only
    once. In this case, the slot of each expert is equal to its id.
    """
    if not placement.has_copies:
        return None
    table = slices.place(torch.from_numpy(placement.slot_table()))
    return ExpertCopies(table, slices.experts.groups.dp_rank)


def _load_shared(
    slices: WeightSlices, experts: ExpertSpec, hidden: int, prefix: str
) -> SharedExperts | None:
    if not experts.num_shared:
        return None
    width, name = experts.width_of_shared, f"{prefix}.shared_experts"
    sizes = hidden, width, slices.share(width)
    gate_up, down = _gate_up(slices, name, *sizes), _down(slices, name, *sizes)
    gate = None
    if experts.gates_shared:
        gate = slices.place(slices.columns(f"{prefix}.shared_expert_gate.weight", 1, hidden, 0, 1))
    products = slices.product(gate_up), slices.product(down)
    side, activation = slices.experts.side, slices.activation(products[1])
    return SharedExperts(*products, side, gate, activation)


def _gate_up(
    slices: WeightSlices, prefix: str, hidden: int, width: int, share: tuple[int, int]
) -> list[MatrixPart]:
    """Return the matrices of gate and up, for a part of the inner width: [hidden, 2 * part]."""
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return [slices.matrix(name, (width, hidden), 0, *share) for name in names]


def _down(
    slices: WeightSlices, prefix: str, hidden: int, width: int, share: tuple[int, int]
) -> list[MatrixPart]:
    """Return the matrix of down, for a part of the inner width: [part, hidden]."""
    return [slices.matrix(f"{prefix}.down_proj", (hidden, width), 1, *share)]
