"""Which faults are tried, in which order and when: all of it follows from a seed.

When a fault strikes is said in logical steps, such as after the k-th delta of all streams, so that
a slow machine sees what a fast one does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What goes wrong; the value is what the table calls it."""

    KILL_WORKER = "worker killed"
    PREFILL_DEATH = "worker dies in a prefill"
    KILL_ENGINE = "engine killed"
    STOP_WORKER = "worker stopped, continued later"
    STOP_ENGINE = "engine stopped, continued later"
    OPERATOR_FAILS = "an operator fails"
    LINK_FAILS = "a link fails"
    BAD_KV = "memory of the KV cache turns bad"
    BAD_WEIGHT = "memory of weights turns bad"
    STALL = "a collective stalls"
    SLOW_READERS = "slow readers"
    VANISHING = "clients vanish"
    OVERLOAD = "overload"
    FULL_DISK = "disk full, then a worker killed"
    KILL_CONTROLLER = "controller killed"
    KILL_INGRESS = "ingress killed"
    STOP_INGRESS = "ingress stopped, until it is killed"
    KILL_RAYLET = "raylet killed"
    KILL_OWNER = "owner of the deployment killed"
    STOP_OWNER = "owner of the deployment stopped, until it is killed"
    # Inside the recovery of another fault only.
    CAPTURE_DEATH = "a rank of the replacement dies in its capture"
    CAPTURE_MEMORY = "memory of the replacement runs out in its capture"


# They end a group, which is replaced.
GROUP_ENDING = (
    Kind.KILL_WORKER,
    Kind.PREFILL_DEATH,
    Kind.KILL_ENGINE,
    Kind.STOP_WORKER,
    Kind.STOP_ENGINE,
    Kind.STALL,
)
IN_RECOVERY = (Kind.CAPTURE_DEATH, Kind.CAPTURE_MEMORY, Kind.KILL_WORKER, Kind.KILL_ENGINE)
FIRSTS = tuple(kind for kind in Kind if kind not in IN_RECOVERY[:2])
MAX_TARGET = 1 << 16


@dataclass(frozen=True)
class Fault:
    """A fault, or two, of which the second strikes inside the recovery of the first.

    Attributes:
        second: strikes once the first is known, or in the capture that it is about.
    """

    kind: Kind
    second: Kind | None = None

    def __str__(self) -> str:
        return self.kind.value if self.second is None else f"{self.kind.value}; {self.second.value}"


@dataclass(frozen=True)
class Strike:
    """One fault of a plan.

    Attributes:
        after_deltas: how many deltas all streams together have seen before it.
        target: chooses among the processes that may be meant, modulo their number.
    """

    number: int
    fault: Fault
    after_deltas: int
    target: int

    def __str__(self) -> str:
        return f"{self.number}: {self.fault}, after {self.after_deltas} deltas"


def make_plan(
    seed: int, count: int, *, max_deltas: int, kinds: Sequence[Kind] = FIRSTS
) -> list[Strike]:
    """Return ``count`` strikes: round after round of all faults, each in an order of its own.

    Args:
        max_deltas: the latest that a fault strikes.
        kinds: those that may come first; the others are left out.
    """
    chance = random.Random(seed)
    strikes: list[Strike] = []
    while len(strikes) < count and kinds:
        for fault in _round(chance, kinds):
            after = chance.randint(1, max_deltas)
            strikes.append(Strike(len(strikes) + 1, fault, after, chance.randrange(MAX_TARGET)))
    return strikes[:count]


def _round(chance: random.Random, kinds: Sequence[Kind]) -> list[Fault]:
    """Every kind alone, then one of those that end a group with each of the second ones."""
    alone = [Fault(kind) for kind in kinds]
    ending = [kind for kind in kinds if kind in GROUP_ENDING]
    pairs = [Fault(chance.choice(ending), second) for second in IN_RECOVERY if ending]
    chance.shuffle(alone)
    chance.shuffle(pairs)
    return alone + pairs
