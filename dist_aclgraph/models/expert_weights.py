"""Loading a layer's experts: each split over the tensor parallel group by its inner width."""

from __future__ import annotations

import torch

from dist_aclgraph.layers.experts import ExpertLayer, Router
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.models.spec import ExpertSpec


def load_experts(
    slices: WeightSlices, experts: ExpertSpec, hidden: int, prefix: str
) -> ExpertLayer:
    """Return this rank's part of the experts.

    Args:
        hidden: width of the layer's input and output.
        prefix: of the feed-forward part's names, such as ``model.layers.3.mlp``.
    """
    width, share = experts.width, slices.share(experts.width)
    gate_up, down = [], []
    for index in range(experts.num_experts):
        expert = f"{prefix}.experts.{index}"
        parts = [
            slices.columns(f"{expert}.{name}.weight", width, hidden, *share)
            for name in ("gate_proj", "up_proj")
        ]
        gate_up.append(torch.cat(parts, dim=1))
        down.append(slices.part(f"{expert}.down_proj.weight", (hidden, width), 1, *share).t())
    router = slices.columns(
        f"{prefix}.gate.weight", experts.num_experts, hidden, 0, experts.num_experts
    )
    return ExpertLayer(
        Router(slices.place(router), experts.top_k, experts.renormalizes),
        slices.place(torch.stack(gate_up)),
        slices.place(torch.stack(down)),
        slices.group,
    )
