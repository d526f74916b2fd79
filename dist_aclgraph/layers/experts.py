"""A layer of experts: each token runs a few of them, chosen by a router, and all shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.comm.groups import RankGroups
from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.layers.local_experts import LocalExperts
from dist_aclgraph.layers.router import Router
from dist_aclgraph.layers.shared_experts import SharedExperts, SideStream
from dist_aclgraph.layers.token_exchange import Exchange
from dist_aclgraph.topology import ExchangeKind


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
class ExpertSetup:
    """How a rank runs its layers of experts.

    Attributes:
        capacity_factor: room of an all-to-all, see ``expert_capacity``.
        side: where shared experts run beside the routed ones; None: before them.
        mc2_sends_scales: see ``Mc2``.
    """

    groups: RankGroups
    capacity_factor: float = 2.0
    side: SideStream | None = None
    mc2_sends_scales: bool = False


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer, routed and shared.

    Without expert parallelism each routed expert is split over the tensor parallel group; with it
    each rank of the expert parallel group has some as a whole. Shared ones are always split. What
    remains to be added up over the tensor parallel group is one sum for both.

    Attributes:
        exchanges: to experts of other ranks; none without expert parallelism.
    """

    router: Router
    local: LocalExperts
    groups: RankGroups
    exchanges: Mapping[ExchangeKind, Exchange]
    shared: SharedExperts | None = None

    def __call__(self, x: Tensor, slots: Tensor, step: ExpertStep) -> Tensor:
        """[n, hidden] -> [n, hidden], on all ranks of the tensor parallel group.

        Args:
            x: the same on all ranks of the tensor parallel group; ``n`` is equal on all ranks of
                the expert parallel group.
            slots: [n] int32, where each token's KV is written; ``PADDING_SLOT`` is padding, which
                comes last, goes to no expert, and whose result means nothing.
        """
        if self._is_together(step):
            with self._running_shared(x) as shared:
                routed = self.local(x, *self.router(x, slots), step.tally)
            total = routed if shared is None else routed.add_(shared)
            return self.groups.tp.all_reduce(total)
        assert step.exchange is not None
        return self._exchanged(x, slots, self.exchanges[step.exchange], step.tally)

    def _is_together(self, step: ExpertStep) -> bool:
        """Whether the tensor parallel group has all experts, and nothing else is asked for."""
        tp, ep = self.groups.tp, self.groups.ep
        has_all = ep.size == 1 or ep.ranks == tp.ranks
        # Without an exchange, spread experts would give the sum of a few of them.
        assert has_all or step.exchange is not None
        return has_all and step.exchange in (None, "all_gather")

    def _exchanged(
        self, x: Tensor, slots: Tensor, exchange: Exchange, tally: Tensor | None
    ) -> Tensor:
        """Let each rank exchange its slice, and put the slices together."""
        tp, n = self.groups.tp, x.shape[0]
        # On all ranks, although the last ones alone lack tokens: all must capture the same.
        missing = -n % tp.size
        if missing:
            x = pad(x, (0, 0, 0, missing))
            slots = pad(slots, (0, missing), value=PADDING_SLOT)
        m = x.shape[0] // tp.size
        mine = slice(tp.rank * m, (tp.rank + 1) * m)
        # A view of the slots would begin anywhere; operators load blocks of 32 bytes.
        rows = torch.arange(mine.start, mine.stop, dtype=torch.int32, device=x.device)
        with self._running_shared(x) as shared:
            own = x[mine]
            routed = exchange(own, *self.router(own, slots.index_select(0, rows)), tally)
        if shared is None:
            return tp.all_gather(routed).flatten(0, 1)[:n]
        shared[mine].add_(routed)
        return tp.all_reduce(shared)[:n]

    def _running_shared(self, x: Tensor) -> AbstractContextManager[Tensor | None]:
        return nullcontext() if self.shared is None else self.shared.running(x)
