"""How the tokens of a step travel to experts of other ranks: the rule, and the room of each way.

Every number of the rule is the same on all ranks, so that all of them choose alike without asking.
A rank brings the slice of its tokens that is its own in its tensor parallel group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dist_aclgraph.config import Config, ExchangeSetting
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.mc2 import MIB, Mc2
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.topology import ExchangeKind

# What another way than gathering must save in each layer: what a link of 20 GB/s moves in the time
# of two dozen small operators. Nobody has measured it on an NPU.
MIN_SAVED_BYTES = 2 * MIB
MIN_CAPACITY = 16  # rows for one rank; the fewer tokens, the less evenly they spread


def expert_capacity(num_rows: int, ep: int, top_k: int, factor: float) -> int:
    """Return the rows that a rank may send to one other in an all-to-all of ``num_rows`` tokens.

    Args:
        factor: multiple of what is expected where every choice of experts is as likely as another.
    """
    expected = num_rows * (1 - (1 - 1 / ep) ** top_k)
    return min(num_rows, max(MIN_CAPACITY, math.ceil(factor * expected)))


def experts_per_rank(num_experts: int, ep: int) -> int:
    """Return how many whole experts each of ``ep`` ranks has.

    Raises:
        ConfigError: they cannot be divided.
    """
    if num_experts % ep:
        raise ConfigError(f"parallel.ep is {ep}; it must divide the model's {num_experts} experts")
    return num_experts // ep


class Decision(NamedTuple):
    """How tokens travel, and why."""

    kind: ExchangeKind | None
    reason: str


class Stretch(NamedTuple):
    """Batches of ``first`` to ``last`` tokens that travel alike."""

    first: int
    last: int
    decision: Decision


@dataclass(frozen=True, kw_only=True)
class ExchangeRule:
    """Decides for every size of batch.

    Attributes:
        tp: ranks of a tensor parallel group.
        mc2: MC2 in this deployment, with the numbers of the experts; None where every tensor
            parallel group has all of them.
        setting: what the configuration wants.
        capacity_factor: see ``expert_capacity``.
        max_tokens: of one batch.
    """

    tp: int
    mc2: Mc2 | None
    setting: ExchangeSetting
    capacity_factor: float
    max_tokens: int

    @classmethod
    def from_config(cls, config: Config, facts: ModelFacts, chip: Chip) -> ExchangeRule:
        """Return the rule of a deployment.

        Args:
            chip: of all ranks, as far as its generation and its line of CANN.

        Raises:
            ConfigError: the experts cannot be divided, or what the configuration wants is not to be
                had; names value, limit and remedy.
        """
        parallel, experts = config.parallel, facts.experts
        mc2 = None
        if parallel.ep > 1:
            if experts is None:
                raise ConfigError(f"parallel.ep is {parallel.ep}; the model has no experts: set 1")
            experts_per_rank(experts.num_experts, parallel.ep)
            mc2 = Mc2(
                ep=parallel.ep,
                num_experts=experts.num_experts,
                top_k=experts.top_k,
                hidden=facts.hidden_size,
                element_bytes=4 if config.dtype == "float32" else 2,
                chip=chip,
                expansion=config.device.expansion,
                buffer_mb=config.device.mc2_buffer_mb,
            )
        rule = cls(
            tp=parallel.tp,
            mc2=mc2,
            setting=parallel.exchange,
            capacity_factor=parallel.expert_capacity,
            max_tokens=config.scheduler.max_num_batched_tokens,
        )
        rule._check()
        return rule

    def choose(self, num_tokens: int) -> ExchangeKind | None:
        """Return how tokens travel where each data parallel rank runs ``num_tokens``, padding too.

        None where none has to.
        """
        return self.decide(num_tokens).kind

    def decide(self, num_tokens: int) -> Decision:
        """Return the choice with its reason.

        All take two exchanges of a layer. Gathering is the simplest: no token can miss an expert,
        and no index is computed. The others must save bytes: MC2 moves exactly what was chosen; an
        all-to-all leaves room for uneven routing, and its step is run again where that is too
        little.
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
        if self._saved_bytes(rows, capacity) >= MIN_SAVED_BYTES:
            share = 1 - capacity / rows
            return Decision("all_to_all", f"it moves {share:.0%} less than all_gather{note}")
        return Decision("all_gather", f"no other way saves enough bytes{note}")

    def stretches(self) -> list[Stretch]:
        """Return what is decided for all sizes of batch, from one token to the most."""
        found: list[Stretch] = []
        for first in range(1, self.max_tokens + 1, self.tp):
            last = min(self.max_tokens, first + self.tp - 1)  # as many rows of each rank
            decision = self.decide(first)
            if found and found[-1].decision.kind == decision.kind:
                found[-1] = found[-1]._replace(last=last)
            else:
                found.append(Stretch(first, last, decision))
        return found

    @property
    def mc2_buffer_mb(self) -> int | None:
        """HCCL's buffer in MB of the domain that MC2 has for itself; None where nothing uses it."""
        if self.mc2 is None:
            return None
        last = max((s.last for s in self.stretches() if s.decision.kind == "mc2"), default=None)
        if last is None:
            return None
        return self.mc2.buffer_mb or self.mc2.needed_mb(-(-last // self.tp))

    def _saved_bytes(self, gathered: int, sent: float) -> float:
        """What a rank need not receive in one layer, there and back, if each other rank sends it
        ``sent`` rows in place of ``gathered``.
        """
        assert self.mc2 is not None
        row = self.mc2.hidden * self.mc2.element_bytes
        return 2 * (self.mc2.ep - 1) * (gathered - sent) * row

    def _check(self) -> None:
        """Refuse an explicit MC2 that no batch, or not every batch of its operators, can take."""
        if self.mc2 is None or self.setting != "mc2":
            return
        # Larger batches than its operators take go another way.
        rows = min(self.mc2.max_rows, -(-self.max_tokens // self.tp))
        obstacle = self.mc2.obstacle(rows)
        if obstacle is not None:
            raise ConfigError(
                f"parallel.exchange is mc2, but {obstacle}; change that or set "
                "parallel.exchange=auto"
            )
