"""The experts whose weights a rank holds, computed for given rows.

Operators: ``npu_moe_init_routing_v2`` (copies each token once for each of its experts here, sorted
by expert), ``npu_grouped_matmul`` (one product for all experts) and ``npu_moe_finalize_routing``
(the weighted sum, back in token order). No size depends on the routing, so graphs can contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# meaning of an entry of a group list: end of an expert's rows, or their number
CUMULATIVE, COUNTS = 0, 1


class ExpertProduct(Protocol):
    """One product per expert, with any kind of weight: floats here, or int8."""

    @property
    def weight(self) -> Tensor:
        """[num_local, in, out]."""

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""


@dataclass(frozen=True)
class GroupedProduct:
    """Weights in the type of the rows.

    Attributes:
        weight: [num_local, in, out].
    """

    weight: Tensor

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
        return multiply_groups(rows, self.weight, counts)


def multiply_groups(rows: Tensor, weight: Tensor, counts: Tensor, **quantised: Any) -> Tensor:
    """Multiply each group's rows with its weight: [rows, in] -> [rows, out].

    Args:
        weight: [groups, in, out].
        counts: [groups] int64, rows of each group.
        quantised: further arguments of the operator for int8.
    """
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        # The operator refuses a list of one count. The end of the only group is the same number.
        group_list_type=COUNTS if len(counts) > 1 else CUMULATIVE,
        group_type=0,
        split_item=3,
        **quantised,
    )[0]
    return out


@dataclass(frozen=True)
class LocalExperts:
    """A range of a layer's experts, or a part of all of them split by inner width.

    Attributes:
        gate_up: hidden -> 2 * width of each expert.
        down: width -> hidden of each expert.
        first: index of the first one among all experts.
        num_experts: number of experts of the layer.
    """

    gate_up: ExpertProduct
    down: ExpertProduct
    first: int
    num_experts: int

    @property
    def num_local(self) -> int:
        return self.gate_up.weight.shape[0]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        """Return the contribution of these experts to each token: [n, hidden], zero if none was
        chosen.

        Args:
            x: [n, hidden].
            experts: [n, top_k] int32, ids in the whole layer; ``num_experts`` means no expert.
            weights: [n, top_k] float32.
            tally: see ``ExpertStep``.
        """
        npu = torch.ops.npu
        rows, order, counts, _ = npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=experts.numel(),
            expert_num=self.num_experts + 1,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first, self.first + self.num_local],
            row_idx_type=0,
        )
        y: Tensor = npu.npu_moe_finalize_routing(
            self.compute(rows, counts, tally)[None],
            None,
            None,
            None,
            # The operator accepts float32 routing weights only with bfloat16 rows.
            weights if x.dtype == torch.bfloat16 else weights.to(x.dtype),
            order,
            None,
            drop_pad_mode=3,  # rows of rank 3; some choices have no row
        )
        return y

    def compute(self, rows: Tensor, counts: Tensor, tally: Tensor | None) -> Tensor:
        """Run each row through its expert: [rows, hidden] -> [rows, hidden].

        Args:
            rows: sorted by expert; rows beyond the last expert's are unchanged.
            counts: [num_local] int64, rows of each expert.
        """
        if tally is not None:
            tally[0].add_(counts.int().sum(dtype=torch.int32))
        return self.down(torch.ops.npu.npu_swiglu(self.gate_up(rows, counts)), counts)
