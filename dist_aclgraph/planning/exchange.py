"""Chooses the exchange by which a step's tokens are sent to experts on other ranks, and computes
the exchange's capacity.

All inputs of the rule are the same on all ranks. So all ranks make the same choice without
communication. All ranks of a tensor parallel group have the same tokens, and each rank sends only
its slice of these tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dist_aclgraph.config import Config, ExchangeSetting
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.expert_placement import place_experts
from dist_aclgraph.planning.mc2 import MIB, Mc2
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.topology import MAY_LOSE_TOKENS, ExchangeKind

# An exchange other than all_gather is chosen only if it saves at least this many bytes in each
# layer. Estimate, not measured on an NPU: sending these bytes over a link of 20 GB/s takes as long
# as about two dozen small operators.
MIN_SAVED_BYTES = 2 * MIB
# Minimum capacity, in rows for each rank. The minimum is for steps with few tokens, in which some
# ranks get many more rows than the average.
MIN_CAPACITY = 16


def expert_capacity(num_rows: int, ep: int, top_k: int, factor: float) -> int:
    """Return how many of its ``num_rows`` tokens a rank may send to any one rank in an all-to-all.

    Args:
        factor: the capacity, divided by the number of tokens that one rank would get with uniform
            routing.
    """
    expected = num_rows * (1 - (1 - 1 / ep) ** top_k)
    return min(num_rows, max(MIN_CAPACITY, math.ceil(factor * expected)))


class Decision(NamedTuple):
    """The exchange that is chosen for a batch, and the reason for the choice."""

    kind: ExchangeKind | None
    reason: str


class Stretch(NamedTuple):
    """A range of batch sizes, from ``first`` to ``last`` tokens, with the same decision."""

    first: int
    last: int
    decision: Decision


@dataclass(frozen=True, kw_only=True)
class ExchangeRule:
    """Chooses the exchange for every batch size.

    Attributes:
        tp: number of ranks of a tensor parallel group.
        mc2: the properties of MC2 in this deployment; None if every tensor parallel group has all
            experts.
        setting: the configured exchange.
        capacity_factor: capacity of an all-to-all, divided by the expected number of rows
            (``expert_capacity``).
        max_tokens: maximum number of tokens of one batch.
        may_run_again: whether a step may run a second time, after an exchange with too little
            capacity; false for a model with recurrent state. If steps run only once, no exchange
            with limited capacity is chosen.
    """

    tp: int
    mc2: Mc2 | None
    setting: ExchangeSetting
    capacity_factor: float
    max_tokens: int
    may_run_again: bool = True

    @classmethod
    def from_config(cls, config: Config, facts: ModelFacts, chip: Chip) -> ExchangeRule:
        """Return the rule of a deployment.

        Args:
            chip: the chip that all ranks have. The rule depends on the chip's generation and CANN
                release.

        Raises:
            ConfigError: the experts cannot be divided evenly, or the configured exchange is
                impossible; the message names value, limit and remedy.
        """
        parallel, experts = config.parallel, facts.experts
        if parallel.redundant_experts and parallel.ep == 1:
            raise ConfigError(
                f"parallel.redundant_experts is {parallel.redundant_experts} and parallel.ep is 1; "
                "copies are for experts that ranks share: set parallel.ep, or redundant_experts=0"
            )
        mc2 = None
        if parallel.ep > 1:
            if experts is None:
                raise ConfigError(f"parallel.ep is {parallel.ep}; the model has no experts: set 1")
            placement = place_experts(experts.num_experts, parallel.ep, parallel.redundant_experts)
            mc2 = Mc2(
                ep=parallel.ep,
                num_experts=placement.num_slots,
                top_k=experts.top_k,
                hidden=facts.hidden_size,
                element_bytes=4 if config.dtype == "float32" else 2,
                chip=chip,
                expansion=config.device.expansion,
                node_npus=config.device.npus_of_node,
                buffer_mb=config.device.mc2_buffer_mb,
                algorithm=parallel.mc2_algorithm,
            )
        rule = cls(
            tp=parallel.tp,
            mc2=mc2,
            setting=parallel.exchange,
            capacity_factor=parallel.expert_capacity,
            max_tokens=config.scheduler.max_num_batched_tokens,
            may_run_again=facts.linear is None,
        )
        rule._check()
        return rule

    def choose(self, num_tokens: int) -> ExchangeKind | None:
        """Return the exchange of a step in which each data-parallel rank runs ``num_tokens``
        tokens, padding included. Return None if no token needs to be sent.
        """
        return self.decide(num_tokens).kind

    def decide(self, num_tokens: int) -> Decision:
        """Return the exchange for ``num_tokens`` tokens, and the reason for this choice.

        Each exchange communicates twice in each layer. all_gather is the simplest exchange: it
        sends every token to every rank, and computes no indices. So another exchange is chosen only
        if it saves bytes. MC2 sends each token only to the experts that the token chose. An
        all-to-all needs additional capacity for uneven routing. If its capacity is too small, the
        step must run again.
        """
        mc2 = self.mc2
        if mc2 is None:
            return Decision(None, "every tensor parallel group has all experts")
        rows = -(-num_tokens // self.tp)
        why_not = mc2.obstacle(rows)
        setting = "auto" if self.setting == "mc2" and why_not else self.setting
        if setting != "auto":
            return Decision(setting, "parallel.exchange says so")
        if mc2.ep == self.tp:
            return Decision("all_gather", "a tensor parallel group has all tokens and all experts")
        why_not = why_not or mc2.loss()
        if (
            why_not is None
            and self._saved_bytes(rows, rows * mc2.top_k / mc2.ep) >= MIN_SAVED_BYTES
        ):
            return Decision("mc2", "it moves the fewest bytes, within its limits")
        note = "" if why_not is None else f"; not mc2: {why_not}"
        capacity = expert_capacity(rows, mc2.ep, mc2.top_k, self.capacity_factor)
        if self.may_run_again and self._saved_bytes(rows, capacity) >= MIN_SAVED_BYTES:
            share = 1 - capacity / rows
            return Decision("all_to_all", f"it moves {share:.0%} less than all_gather{note}")
        return Decision("all_gather", f"no other way saves enough bytes{note}")

    def stretches(self) -> list[Stretch]:
        """Return the decisions for all batch sizes, from one token to ``max_tokens``."""
        found: list[Stretch] = []
        for first in range(1, self.max_tokens + 1, self.tp):
            # For all batches of ``first`` to ``last`` tokens, the slice of a rank has the same
            # size.
            last = min(self.max_tokens, first + self.tp - 1)
            decision = self.decide(first)
            if found and found[-1].decision.kind == decision.kind:
                found[-1] = found[-1]._replace(last=last)
            else:
                found.append(Stretch(first, last, decision))
        return found

    @property
    def mc2_buffer_mb(self) -> int | None:
        """Size of HCCL's buffer for the communication domain of MC2, in MB; None if no batch uses
        MC2.
        """
        if self.mc2 is None:
            return None
        last = max((s.last for s in self.stretches() if s.decision.kind == "mc2"), default=None)
        if last is None:
            return None
        return self.mc2.buffer_mb or self.mc2.needed_mb(-(-last // self.tp))

    @property
    def ranks_of_node(self) -> int | None:
        """The number of ranks that must be on each node; None if any number is possible."""
        operators = self.mc2.operators if self.mc2 and self.mc2_buffer_mb is not None else None
        return operators.ranks_of_node if operators else None

    def _saved_bytes(self, gathered: int, sent: float) -> float:
        """Return how many bytes a rank saves in one layer if another exchange replaces all_gather.
        Sent bytes and received bytes are added up.

        Args:
            gathered: number of rows that a rank receives from each other rank with all_gather.
            sent: number of rows that a rank receives from each other rank with the exchange that is
                compared to all_gather.
        """
        assert self.mc2 is not None
        row = self.mc2.hidden * self.mc2.element_bytes
        return 2 * (self.mc2.ep - 1) * (gathered - sent) * row

    def _check(self) -> None:
        """Raise an error if the configured exchange cannot run all batches."""
        if self.mc2 is not None and self.setting in MAY_LOSE_TOKENS and not self.may_run_again:
            raise ConfigError(
                f"parallel.exchange is {self.setting}, whose steps may run twice; a model with "
                "linear attention runs every step once: set parallel.exchange=auto"
            )
        if self.mc2 is None or self.setting != "mc2":
            return
        # The check covers only numbers of rows up to MC2's limit, because larger batches use
        # another exchange.
        rows = min(self.mc2.max_rows, -(-self.max_tokens // self.tp))
        obstacle = self.mc2.obstacle(rows)
        if obstacle is not None:
            raise ConfigError(
                f"parallel.exchange is mc2, but {obstacle}; change that or set "
                "parallel.exchange=auto"
            )
