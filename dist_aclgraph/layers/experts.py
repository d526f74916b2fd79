"""A layer of experts: each token runs a few of them, chosen by a router.

Operators: ``npu_moe_gating_top_k``, ``npu_moe_init_routing_v2`` (copies each token once for each of
its experts, sorted by expert), ``npu_grouped_matmul`` (one product for all experts) and
``npu_moe_finalize_routing`` (the weighted sum, back in token order). No size depends on the
routing, so that graphs hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.topology import ExchangeKind

SOFTMAX = 0  # norm_type of npu_moe_gating_top_k
COUNTS = 1  # group lists hold the tokens of each expert, not their running sum


@dataclass(frozen=True)
class ExpertStep:
    """How the tokens of a step meet their experts; the same on every rank.

    Attributes:
        exchange: None where every tensor parallel group has all experts.
        tally: [2] int64, added to: tokens that this rank's experts computed, and tokens that found
            no room in an exchange.
    """

    exchange: ExchangeKind | None = None
    tally: Tensor | None = None


ALL_HERE = ExpertStep()


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token by softmax scores.

    Attributes:
        weight: [hidden, num_experts].
        top_k: experts of a token.
        renormalizes: whether the chosen experts' weights sum to one.
    """

    weight: Tensor
    top_k: int
    renormalizes: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> weights [n, top_k], experts [n, top_k] int32."""
        scores = torch.mm(x, self.weight)
        gate = torch.ops.npu.npu_moe_gating_top_k
        weights, experts, _ = gate(scores, k=self.top_k, norm_type=SOFTMAX)
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts


@dataclass(frozen=True)
class ExpertLayer:
    """All experts, each split over the tensor parallel group by its inner width.

    Attributes:
        gate_up: [num_experts, hidden, 2 * width / size].
        down: [num_experts, width / size, hidden].
    """

    router: Router
    gate_up: Tensor
    down: Tensor
    group: CommGroup

    def __call__(self, x: Tensor, slots: Tensor, step: ExpertStep) -> Tensor:
        """[n, hidden] -> [n, hidden], summed over the group.

        Args:
            slots: [n] int32, where each token's KV is written; -1 is padding, whose result means
                nothing.
        """
        npu, num_experts = torch.ops.npu, self.gate_up.shape[0]
        weights, experts = self.router(x)
        rows, order, counts, _ = npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=experts.numel(),
            expert_num=num_experts,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, num_experts],
            row_idx_type=0,
        )
        hidden = npu.npu_swiglu(_product(rows, self.gate_up, counts))
        y = npu.npu_moe_finalize_routing(
            _product(hidden, self.down, counts),
            None,
            None,
            None,
            weights.to(x.dtype),
            order,
            experts,
            drop_pad_mode=2,
        )
        return self.group.all_reduce(y)


def _product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weights],
        group_list=counts,
        group_list_type=COUNTS,
        group_type=0,
        split_item=3,
    )[0]
    return out
