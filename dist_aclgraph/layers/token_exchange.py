"""Three exchanges that run a rank's tokens on the experts of other ranks. They have the same
interface.

All ranks of a tensor parallel group have the same tokens. In an exchange, each of these ranks sends
only its slice of the tokens, so that every token is sent once. The layer joins the slices again
afterwards. All three exchanges can be captured in graphs, because no shape depends on the routing,
and the host reads no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.local_experts import COUNTS, LocalExperts
from dist_aclgraph.planning.exchange import expert_capacity
from dist_aclgraph.planning.mc2 import Mc2Operators
from dist_aclgraph.topology import ExchangeKind

ALIGNED_BYTES = 32  # Operators load blocks of 32 bytes.


class Exchange(Protocol):
    """Runs the tokens of all ranks of an expert parallel group through the group's experts."""

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        """Return, for each token, the weighted sum of its experts' results: [m, hidden]. The sum is
        zero for padding.

        Args:
            x: [m, hidden], this rank's slice of the tokens; ``m`` must be equal on all ranks.
            experts: [m, top_k] int32, the experts of each token. Padding tokens come last, and all
                of their ids are ``num_experts``.
            weights: [m, top_k] float32.
            tally: see ``ExpertStep``.
        """


@dataclass(frozen=True)
class AllGather:
    """Sends all tokens to every rank. Each rank adds the results of its experts to the sum."""

    group: CommGroup
    local: LocalExperts

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        gathered = self.group.all_gather(pack(x, experts, weights)).flatten(0, 1)
        partial = self.local(*unpack(gathered, x.shape[1], experts.shape[1]), tally)
        return self.group.reduce_scatter(partial)


@dataclass(frozen=True)
class AllToAll:
    """Sends each token once to every rank that has an expert of the token.

    All ranks exchange arrays of equal size. So a rank accepts the same maximum number of tokens
    from each other rank. Tokens above this maximum are counted, but not sent. The results of these
    tokens are wrong, so the step must run again.

    Attributes:
        factor: maximum number of tokens that a rank accepts from another rank, divided by the
            number that would be expected if experts were chosen at random.
    """

    group: CommGroup
    local: LocalExperts
    factor: float

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        (m, hidden), top_k, size = x.shape, experts.shape[1], self.group.size
        capacity = expert_capacity(m, size, top_k, self.factor)
        # All integers are int32, because chips sum and scatter wider types on their slow AI CPU.
        ranks = torch.arange(size, dtype=torch.int32, device=x.device)
        owner = torch.div(experts, self.local.num_local, rounding_mode="floor")
        is_wanted = (owner.unsqueeze(-1) == ranks).any(1)  # [m, ranks]
        # For each token and each rank: the token's index among the tokens that are sent to the
        # rank.
        place = is_wanted.cumsum(0, dtype=torch.int32) - 1
        fits = is_wanted & (place < capacity)
        if tally is not None:
            tally[1].add_((is_wanted & ~fits).sum(dtype=torch.int32))
        place = place + ranks * capacity
        sent = self._sent(x, experts, weights, place, fits, size * capacity)
        received = self.group.all_to_all(sent)
        partial = self.local(*unpack(received, hidden, top_k), tally)
        returned = self.group.all_to_all(partial)
        y: Tensor = torch.ops.npu.npu_moe_finalize_routing(
            returned[None],
            None,
            None,
            None,
            torch.ones_like(fits, dtype=x.dtype),
            torch.where(fits, place, -1).flatten(),
            None,
            drop_pad_mode=3,
        )
        return y

    def _sent(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        place: Tensor,
        fits: Tensor,
        num_places: int,
    ) -> Tensor:
        """Return the rows to send, [num_places, columns]. Rows without tokens contain padding."""
        more, m, device = (0, 0, 0, 1), x.shape[0], x.device
        # Each row without a token contains the padding token that is added here. Tokens that are
        # not sent are assigned to an additional row, which is not returned.
        nowhere = self.local.num_experts
        tokens = pack(pad(x, more), pad(experts, more, value=nowhere), pad(weights, more))
        source = torch.full((num_places + 1,), m, dtype=torch.int32, device=device)
        index = torch.arange(m, dtype=torch.int32, device=device).unsqueeze(1).expand_as(place)
        where = torch.where(fits, place, num_places).flatten().long()
        source.scatter_(0, where, index.flatten())
        return tokens.index_select(0, source[:num_places])


@dataclass(frozen=True)
class Mc2Exchange:
    """Sends each token to each of its experts, by the operators of MC2. These operators send only
    tokens, whereas an all-to-all also sends rows of padding.

    The operators are ``npu_moe_distribute_dispatch_v2`` and ``npu_moe_distribute_combine_v2``. The
    planner checks the limits of these operators. If the operators accept no mask, padding tokens
    are sent, computed and counted like other tokens.

    Attributes:
        group: the expert parallel ranks, in a communication group that only MC2 uses.
        operators: properties of MC2's operators on this chip.
    """

    group: CommGroup
    local: LocalExperts
    operators: Mc2Operators

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, tally: Tensor | None) -> Tensor:
        npu, operators = torch.ops.npu, self.operators
        is_padding = experts[:, 0] == self.local.num_experts
        experts = torch.where(is_padding.unsqueeze(1), self._experts_of_padding(experts), experts)
        domain = (
            self.group.hccl_name,
            self.group.size,
            self.group.rank,
            self.local.num_experts,
        )
        is_live = is_padding.logical_not() if operators.takes_mask else None
        self.group.marks.before("mc2_dispatch")
        rows, _, origins, counts, received, _, scales = npu.npu_moe_distribute_dispatch_v2(
            x,
            experts,
            *domain,
            x_active_mask=is_live,
            expert_scales=weights if operators.takes_scales else None,
            expert_token_nums_type=COUNTS,
            comm_alg=operators.comm_alg,
        )
        computed = self.local.compute(rows, counts, tally)
        self.group.marks.before("mc2_combine")
        y: Tensor = npu.npu_moe_distribute_combine_v2(
            computed,
            experts,
            origins,
            received,
            weights,
            *domain,
            x_active_mask=is_live,
            expand_scales=scales if operators.takes_scales else None,
            comm_alg=operators.comm_alg,
        )
        # The rows of masked tokens are set to zero, because the operator does not write them, and a
        # NaN in them would spread.
        return y.masked_fill_(is_padding.unsqueeze(1), 0)

    def _experts_of_padding(self, experts: Tensor) -> Tensor:
        """Return valid expert ids for padding tokens, [m, top_k] or [1, top_k]. The ids within a
        row are all different.
        """
        top_k, num_experts = experts.shape[1], self.local.num_experts
        # With a mask, padding is not sent, so one row of ids is enough. Without a mask, padding is
        # spread evenly over all experts. ``fmod`` is used because it has a kernel for int32.
        count = top_k if self.operators.takes_mask else experts.numel()
        ids = torch.arange(count, dtype=torch.int32, device=experts.device)
        return (ids if count <= num_experts else ids.fmod(num_experts)).view(-1, top_k)


def make_exchanges(
    groups: RankGroups, local: LocalExperts, factor: float, mc2: Mc2Operators | None
) -> Mapping[ExchangeKind, Exchange]:
    """Return the exchanges of an expert parallel group; empty if the group has only one rank.

    If ``groups`` has a group for MC2, there is also an exchange by MC2, and ``mc2`` must be set.
    """
    if groups.ep.size == 1:
        return {}
    exchanges: dict[ExchangeKind, Exchange] = {
        "all_gather": AllGather(groups.ep, local),
        "all_to_all": AllToAll(groups.ep, local, factor),
    }
    if groups.mc2 is not None:
        assert mc2 is not None
        exchanges["mc2"] = Mc2Exchange(groups.mc2, local, mc2)
    return exchanges


def pack(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return rows, each of which contains a token, its experts and its weights, so that one
    transfer sends all three.

    All columns have the type of ``x``. The bits of experts and weights are stored without
    conversion, and both begin at multiples of 32 bytes.
    """
    missing = -experts.view(x.dtype).shape[1] % (ALIGNED_BYTES // x.element_size())
    numbers = [part.view(x.dtype) for part in (experts, weights)]
    if missing:
        numbers = [pad(part, (0, missing)) for part in numbers]
    return torch.cat([x, *numbers], 1)


def unpack(rows: Tensor, hidden: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values that ``pack`` has packed: x, experts and weights."""
    width = (rows.shape[1] - hidden) // 2
    used = top_k * torch.int32.itemsize // rows.element_size()
    x, experts, weights = torch.split(rows, [hidden, width, width], 1)
    return (
        x.contiguous(),
        experts[:, :used].contiguous().view(torch.int32),
        weights[:, :used].contiguous().view(torch.float32),
    )
