"""A layer of experts. A router chooses a few experts for each token. Shared experts run for
all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.comm.groups import RankGroups
from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.layers.int8_rows import Rows, in_floats
from dist_aclgraph.layers.local_experts import LocalExperts
from dist_aclgraph.layers.router import Router
from dist_aclgraph.layers.shared_experts import SharedExperts, SideStream
from dist_aclgraph.layers.token_exchange import Exchange
from dist_aclgraph.planning.mc2 import Mc2Operators
from dist_aclgraph.topology import ExchangeKind


@dataclass(frozen=True)
class ExpertStep:
    """How a step sends tokens to their experts.

    Attributes:
        exchange: the kind of exchange, the same on all ranks; None if every tensor parallel group
            has all experts, so that no exchange is needed.
        tally: [2] int64, two counters: tokens that this rank's experts have computed, and tokens
            that exceeded the capacity of an exchange. If None, nothing is counted.
    """

    exchange: ExchangeKind | None = None
    tally: Tensor | None = None


ALL_HERE = ExpertStep()


@dataclass(frozen=True)
class ExpertSetup:
    """The settings with which a rank runs its layers of experts.

    Attributes:
        capacity_factor: the argument ``factor`` of ``expert_capacity``; used for the exchange by
            all-to-all.
        side: stream on which shared experts run while routed experts run on the main stream; if
            None, shared experts run before routed experts.
        mc2: the operators of MC2 for this chip; None if MC2 is not used.
        redundant: number of additional copies of experts; see ``place_experts``.
    """

    groups: RankGroups
    capacity_factor: float = 2.0
    side: SideStream | None = None
    mc2: Mc2Operators | None = None
    redundant: int = 0


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a layer, routed and shared.

    Without expert parallelism, each routed expert is split over the tensor parallel group. With
    expert parallelism, each rank of the expert parallel group has some of the experts, and these
    experts are not split. Shared experts are always split over the tensor parallel group. One
    all-reduce in the tensor parallel group adds up the results of routed and shared experts.

    Attributes:
        exchanges: the exchanges that a step can use, by kind; empty without expert parallelism.
    """

    quantises_rows: ClassVar[bool] = False  # the router needs rows in floats

    router: Router
    local: LocalExperts
    groups: RankGroups
    exchanges: Mapping[ExchangeKind, Exchange]
    shared: SharedExperts | None = None

    def __call__(self, x: Rows, slots: Tensor, step: ExpertStep) -> Tensor:
        """Return the layer's results, [n, hidden], on all ranks of the tensor parallel group.

        Args:
            x: [n, hidden], equal on all ranks of the tensor parallel group; ``n`` must be equal on
                all ranks of the expert parallel group.
            slots: [n] int32, KV slot of each token. Padding tokens have ``PADDING_SLOT`` and come
                last. No expert runs padding tokens, and their results are meaningless.
        """
        x = in_floats(x)
        if self._is_together(step):
            with self._running_shared(x) as shared:
                routed = self.local(x, *self.router(x, slots), step.tally)
            total = routed if shared is None else routed.add_(shared)
            return self.groups.tp.all_reduce(total)
        assert step.exchange is not None
        return self._exchanged(x, slots, self.exchanges[step.exchange], step.tally)

    def _is_together(self, step: ExpertStep) -> bool:
        """Return whether every rank runs all tokens of the step through its own experts, without an
        exchange.

        No exchange is needed if the ranks of the tensor parallel group together have all experts.
        """
        tp, ep = self.groups.tp, self.groups.ep
        has_all = ep.size == 1 or ep.ranks == tp.ranks
        # If ranks of other groups have experts, a step without an exchange would lack the results
        # of these experts.
        assert has_all or step.exchange is not None
        return has_all and step.exchange in (None, "all_gather")

    def _exchanged(
        self, x: Tensor, slots: Tensor, exchange: Exchange, tally: Tensor | None
    ) -> Tensor:
        """Compute this rank's slice of the tokens by ``exchange``, then gather the results of all
        slices.
        """
        tp, n = self.groups.tp, x.shape[0]
        # Padding makes all slices equally long. Every rank runs the padding operators, because all
        # ranks must capture the same operators.
        missing = -n % tp.size
        if missing:
            x = pad(x, (0, 0, 0, missing))
            slots = pad(slots, (0, missing), value=PADDING_SLOT)
        m = x.shape[0] // tp.size
        mine = slice(tp.rank * m, (tp.rank + 1) * m)
        # ``index_select`` copies the slots. A view of the slots could begin at any address, but
        # operators need addresses that are multiples of 32 bytes.
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
