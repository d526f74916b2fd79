"""Computes the experts whose weights are on this rank.

Operators: ``npu_moe_init_routing_v2`` copies each token once for each of its experts on this rank,
and sorts the copies by expert; ``npu_grouped_matmul`` computes one product for all experts;
``npu_moe_finalize_routing`` returns the weighted sums in token order. These operators can be
captured in graphs, because the sizes of all tensors are independent of the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dist_aclgraph.layers.int8_rows import Int8Rows, Rows, in_floats

# Types of a group list, which has one element for each expert. With CUMULATIVE, the element is the
# index after the expert's last row. With COUNTS, the element is the expert's number of rows.
CUMULATIVE, COUNTS = 0, 1
NO_QUANT, DYNAMIC_QUANT = -1, 1  # values of quant_mode


# An activation. Its argument is the result of the product with the weights of gate and up. Its
# result is the input of the product with the weights of down.
Activation = Callable[[Tensor], Rows]

# Constants of xIELU; all checkpoints store these values.
XIELU_BETA, XIELU_EPS = 0.5, -1e-6


class ExpertProduct(Protocol):
    """One product for each expert. The class for float weights is in this file. The classes for
    int8 weights and four-bit weights are in ``int8_products`` and ``int4_products``.

    Attributes:
        quantises_rows: see ``Product``.
    """

    quantises_rows: ClassVar[bool]

    @property
    def weight(self) -> Tensor:
        """The weights, [num_local, in, out]."""

    def __call__(self, rows: Rows, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""


@dataclass(frozen=True)
class GroupedProduct:
    """Products with weights that have the same type as the rows.

    Attributes:
        weight: [num_local, in, out].
        bias: [num_local, out] or None. The bias is float32 if the weight is bfloat16; otherwise
            both have the same type.
    """

    quantises_rows: ClassVar[bool] = False

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Rows, counts: Tensor) -> Tensor:
        """Multiply each expert's rows with its weight: [rows, in] -> [rows, out]."""
        rows = in_floats(rows)
        if self.bias is None:
            return multiply_groups(rows, self.weight, counts)
        return multiply_groups(rows, self.weight, counts, bias=[self.bias])


class InnerProduct(Protocol):
    """Multiplies each expert's rows by its weights of gate and up, and applies the activation."""

    @property
    def weight(self) -> Tensor:
        """The weights of gate and up, [num_local, hidden, 2 * width]."""

    def __call__(self, rows: Rows, counts: Tensor) -> Rows:
        """Map [rows, hidden] to the activated values, [rows, width]."""


def multiply_groups(rows: Tensor, weight: Tensor, counts: Tensor, **others: Any) -> Tensor:
    """Multiply each group's rows with its weight: [rows, in] -> [rows, out].

    Args:
        weight: [groups, in, out].
        counts: [groups] int64, number of rows of each group.
        others: additional arguments of the operator, for biases or int8.
    """
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        group_list_type=list_type(counts),
        group_type=0,
        split_item=3,
        **others,
    )[0]
    return out


def list_type(counts: Tensor) -> int:
    """Return the type of the group list that the operator gets: ``CUMULATIVE`` or ``COUNTS``.

    Operators refuse a list of type COUNTS with only one element, but accept such a list of type
    CUMULATIVE. A list with one element is the same for both types.
    """
    return COUNTS if len(counts) > 1 else CUMULATIVE


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``: [rows, 2 * width] -> [rows, width]. The first half of a row is
    the gate.
    """
    y: Tensor = torch.ops.npu.npu_swiglu(gate_up)
    return y


def geglu(gate_up: Tensor) -> Tensor:
    """Return ``gelu(gate) * up``: [rows, 2 * width] -> [rows, width]. The first half of a row is
    the gate. CANN computes gelu with its approximation by tanh.
    """
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of ``relu(x)``, with the same shape; this activation has no gate."""
    x = torch.relu(x)
    return x * x


@dataclass(frozen=True)
class Xielu:
    """The activation of arXiv 2411.13010, without a gate.

    Attributes:
        positive, negative: the factor for positive values, and the factor for all other values.
    """

    positive: float
    negative: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map [rows, width] to [rows, width], element by element."""
        below = (torch.expm1(x.clamp(max=XIELU_EPS)) - x) * self.negative
        return torch.where(x > 0, self.positive * x * x, below) + XIELU_BETA * x


@dataclass(frozen=True)
class ClippedSwiglu:
    """The activation of ``SwigluClip``. In its input, columns of gate and up alternate."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Map [rows, 2 * width] to [rows, width]."""
        y: Tensor = torch.ops.npu.npu_clipped_swiglu(
            gate_up, alpha=self.alpha, limit=self.limit, bias=1.0, interleaved=True
        )
        return y


@dataclass(frozen=True)
class ActivatedProduct:
    """An ``InnerProduct`` that runs the product and the activation as separate operators."""

    product: ExpertProduct
    activate: Activation = swiglu

    @property
    def weight(self) -> Tensor:
        return self.product.weight

    def __call__(self, rows: Rows, counts: Tensor) -> Rows:
        return self.activate(self.product(rows, counts))


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one rank. The rank has either some complete experts, or a part of the inner
    width of every expert.

    Attributes:
        inner: multiplies each expert's rows by its weights of gate and up, and applies the
            activation: hidden -> width.
        down: multiplies each expert's rows by its weights of down: width -> hidden.
        first: index of this rank's first expert among the experts of all ranks.
        num_experts: number of experts of all ranks together, copies included.
        quantises_sorted: whether the operator that sorts rows by experts also converts them to
            int8.
    """

    inner: InnerProduct
    down: ExpertProduct
    first: int
    num_experts: int
    quantises_sorted: bool = False

    @property
    def num_local(self) -> int:
        return self.inner.weight.shape[0]

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        """Return, for each token, the weighted sum of the results of this rank's experts, [n,
        hidden]. The sum is zero if the token chose none of these experts.

        Args:
            x: [n, hidden].
            experts: [n, top_k] int32, for each token, the ids of its experts among all experts; the
                id ``num_experts`` stands for no expert.
            weights: [n, top_k] float32.
            tally: see ``ExpertStep``.
        """
        npu = torch.ops.npu
        rows, order, counts, scales = npu.npu_moe_init_routing_v2(
            x,
            experts,
            active_num=experts.numel(),
            expert_num=self.num_experts + 1,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first, self.first + self.num_local],
            row_idx_type=0,
            quant_mode=DYNAMIC_QUANT if self.quantises_sorted else NO_QUANT,
        )
        if self.quantises_sorted:
            rows = Int8Rows(rows, scales, x.dtype)
        y: Tensor = npu.npu_moe_finalize_routing(
            self.compute(rows, counts, tally)[None],
            None,
            None,
            None,
            # The operator accepts float32 routing weights only with bfloat16 rows.
            weights if x.dtype == torch.bfloat16 else weights.to(x.dtype),
            order,
            None,
            drop_pad_mode=3,  # accepts 3-D rows, and tokens with experts on other ranks
        )
        return y

    def compute(self, rows: Rows, counts: Tensor, tally: Tensor | None) -> Tensor:
        """Run each row through its expert: [rows, hidden] -> [rows, hidden].

        Args:
            rows: the rows, sorted by expert. Rows after the last expert's rows are not computed.
            counts: [num_local] int64, number of rows of each expert.
        """
        if tally is not None:
            tally[0].add_(counts.int().sum(dtype=torch.int32))
        return self.down(self.inner(rows, counts), counts)
