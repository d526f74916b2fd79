"""MC2: operators that send tokens to their experts. This module contains the limits of these
operators, and decides whether a deployment uses MC2.

The limits come from the operators' documents. None of these limits was tested on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dist_aclgraph.config import HcclExpansion, Mc2Algorithm
from dist_aclgraph.config.chips import generation_of
from dist_aclgraph.planning.chip import Chip

MIB = 1 << 20
MAX_EXPERTS, MAX_TOP_K = 1024, 16
# MC2's maximum number of experts, and its maximum number of rows of a rank, on an A2 with CANN 8.
MAX_EXPERTS_CANN_8, MAX_ROWS_CANN_8 = 512, 256


class Mc2Batch(NamedTuple):
    """The sizes of a batch. MC2's operators send the tokens of the batch to experts, and combine
    the results.

    Attributes:
        num_rows: number of tokens on the rank with the most tokens.
        num_local: number of experts on one rank.
    """

    num_rows: int
    hidden: int
    ep: int
    num_local: int
    top_k: int


# The following functions compute how many bytes HCCL's buffer must have. The formulas come from the
# operators' documents.


def a2_fullmesh_bytes(batch: Mc2Batch) -> int:
    rows, hidden, ep, num_local, top_k = batch
    return 2 * (rows * ep * min(num_local, top_k) * 2 * hidden + 2 * MIB)


def a2_hierarchy_bytes(batch: Mc2Batch) -> int:
    rows, hidden, ep, num_local, top_k = batch
    row = 2 * hidden + 4 * _aligned(top_k, 8) * 4
    return (ep * num_local + ep // 4) * _aligned(rows * row, 512) + 8 * MIB


def a3_fullmesh_bytes(batch: Mc2Batch) -> int:
    rows, hidden, ep, num_local, top_k = batch
    dispatch = _aligned(_aligned(2 * hidden, 32) + 64, 512)
    combine = _aligned(2 * hidden, 512)
    return 2 * rows * (dispatch * ep * num_local + combine * top_k)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Mc2Operators:
    """The properties of MC2 on one generation of NPUs, with one algorithm.

    Attributes:
        comm_alg: name of the algorithm, which is passed to the operators.
        max_rows: maximum number of tokens on one rank.
        buffer_bytes: function that returns how many bytes HCCL's buffer must have for a batch.
        pays_from_ep: minimum number of ranks for which other projects use MC2.
        pays_to_local: maximum number of experts on a rank for which other projects use MC2.
        takes_scales: whether the routing weights are sent together with the tokens, both to the
            experts and from the experts.
        takes_mask: whether the operators accept a mask that says which rows are not sent.
        ranks_of_node: the number of ranks that must be on each node; None if any number is
            possible. A group uses all NPUs of its nodes, so each node must have this number of
            NPUs.
    """

    name: str
    algorithm: Mc2Algorithm
    comm_alg: str
    ep_sizes: frozenset[int]
    max_rows: int
    hidden_sizes: range
    buffer_bytes: Callable[[Mc2Batch], int]
    pays_from_ep: int = 2
    pays_to_local: int = MAX_EXPERTS
    takes_scales: bool = False
    takes_mask: bool = True
    ranks_of_node: int | None = None


# The first possible algorithm in this list is used.
MC2_OPERATORS = (
    Mc2Operators(
        "A2",
        "hierarchy",
        "hierarchy",
        frozenset({16, 32, 64}),
        512,
        range(32, 10240 + 1, 32),
        a2_hierarchy_bytes,
        pays_from_ep=16,
        pays_to_local=24,
        takes_scales=True,
        takes_mask=False,
        ranks_of_node=8,
    ),
    Mc2Operators(
        "A2",
        "fullmesh",
        "fullmesh",
        frozenset({2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256}),
        256,
        range(32, 7168 + 1, 32),
        a2_fullmesh_bytes,
        pays_from_ep=16,
        pays_to_local=24,
        takes_scales=True,
    ),
    Mc2Operators(
        "A3",
        "fullmesh",
        "fullmesh_v1",
        frozenset(range(2, 769)),
        512,
        range(1024, 8192 + 1),
        a3_fullmesh_bytes,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Mc2:
    """The properties of MC2 in one deployment. Every attribute is the same on all ranks.

    Attributes:
        num_experts: number of experts on all ranks together, copies included.
        element_bytes: bytes of one element of activations.
        buffer_mb: configured size of HCCL's buffer for the communication domain of MC2, in MB; None
            means the size that the largest batch needs.
        algorithm: the configured algorithm.
    """

    ep: int
    num_experts: int
    top_k: int
    hidden: int
    element_bytes: int
    chip: Chip
    expansion: HcclExpansion
    node_npus: int
    buffer_mb: int | None = None
    algorithm: Mc2Algorithm = "auto"

    @cached_property
    def operators(self) -> Mc2Operators | None:
        """The properties of MC2 with the best algorithm for this number of ranks and nodes. None if
        the chip does not have MC2, or does not have the configured algorithm.
        """
        found = [p for p in self._known_operators if self.algorithm in ("auto", p.algorithm)]
        fitting = (p for p in found if self.ep in p.ep_sizes and self._has_nodes_for(p))
        return next(fitting, found[-1] if found else None)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep

    @property
    def max_rows(self) -> int:
        """Maximum number of tokens of one rank. A larger buffer does not increase this number."""
        rows = self.operators.max_rows if self.operators else 0
        return min(rows, MAX_ROWS_CANN_8) if self._is_a2_of_cann_8 else rows

    def needed_mb(self, num_rows: int) -> int:
        """Return the size in MB that the buffer must have for ``num_rows`` tokens on each rank."""
        assert self.operators is not None
        batch = Mc2Batch(num_rows, self.hidden, self.ep, self.num_local, self.top_k)
        return self.operators.buffer_bytes(batch) // MIB + 1

    def obstacle(self, num_rows: int) -> str | None:
        """Return why MC2 is not possible for ``num_rows`` tokens on each rank; None if it is
        possible.
        """
        return next(self._obstacles(num_rows), None)

    def loss(self) -> str | None:
        """Return why MC2 is not worth using although it is possible; None if it is worth using."""
        operators = self.operators
        assert operators is not None
        if self.ep >= operators.pays_from_ep and self.num_local <= operators.pays_to_local:
            return None
        return (
            f"on {operators.name} it pays from {operators.pays_from_ep} ranks on with at most "
            f"{operators.pays_to_local} experts each"
        )

    @property
    def _known_operators(self) -> list[Mc2Operators]:
        return [p for p in MC2_OPERATORS if p.name == generation_of(self.chip.name)]

    @property
    def _is_a2_of_cann_8(self) -> bool:
        return self.chip.is_cann_8 and generation_of(self.chip.name) == "A2"

    def _has_nodes_for(self, operators: Mc2Operators) -> bool:
        return operators.ranks_of_node in (None, self.node_npus)

    def _obstacles(self, num_rows: int) -> Iterator[str]:
        operators = self.operators
        if operators is None:
            chip = generation_of(self.chip.name)
            names = " and ".join(p.algorithm for p in self._known_operators)
            yield (
                f"parallel.mc2_algorithm is {self.algorithm}; {chip} takes {names}"
                if names
                else f"its limits on {chip} are not known"
            )
            return
        if self.element_bytes != 2:
            yield "it takes float16 and bfloat16, and dtype is float32"
        if operators.name == "A3" and self.expansion == "AIV":
            yield "on A3 it hangs with device.hccl_expansion AIV; FFTS and AICPU are possible"
        if self.ep not in operators.ep_sizes:
            sizes = ", ".join(map(str, sorted(operators.ep_sizes)[:12]))
            yield (
                f"parallel.ep is {self.ep}; {operators.name} takes {sizes} with "
                f"{operators.algorithm}"
            )
        if not self._has_nodes_for(operators):
            yield (
                f"plans assume {self.node_npus} NPUs on each node (device.node_npus); "
                f"{operators.name} takes {operators.ranks_of_node} with {operators.algorithm}"
            )
        if self._is_a2_of_cann_8:
            if self.ep % 8:
                yield f"parallel.ep is {self.ep}; A2 takes multiples of 8 with CANN 8"
            if self.num_experts > MAX_EXPERTS_CANN_8:
                yield f"the model has {self.num_experts} experts; A2 takes at most 512 with CANN 8"
        widths = operators.hidden_sizes
        if self.hidden not in widths:
            yield (
                f"the model's hidden size is {self.hidden}; {operators.name} takes {widths[0]} to "
                f"{widths[-1]} in steps of {widths.step}"
            )
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            yield (
                f"the model has {self.num_experts} experts, {self.top_k} for each token; it takes "
                f"at most {MAX_EXPERTS} and {MAX_TOP_K}"
            )
        if num_rows > self.max_rows:
            yield f"{num_rows} tokens of one rank; {operators.name} takes {self.max_rows}"
        needed = self.needed_mb(num_rows)
        if self.buffer_mb is not None and needed > self.buffer_mb:
            yield (
                f"device.mc2_buffer_mb is {self.buffer_mb}; {num_rows} tokens of one rank need "
                f"{needed}"
            )
