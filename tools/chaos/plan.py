"""A plan says which faults are injected, in which order, and when. A seed determines the plan.

The time of a fault is given by an event, such as the k-th delta of all streams. So the plan does
not depend on the machine's speed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kinds of faults. The value of a kind is its name in the table of results."""

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
    STOP_RAYLET = "raylet stopped, until it is killed"
    STOP_GCS = "control store of Ray stopped, until it is killed"
    KILL_OWNER = "owner of the deployment killed"
    STOP_OWNER = "owner of the deployment stopped, until it is killed"
    # These faults are injected only into a service that keeps copies of KV blocks in files.
    SPOILT_FILES = "bytes of KV files change"
    CUT_FILES = "KV files are cut off"
    LOST_FILES = "KV files are deleted"
    # These faults are injected only into a service on several hosts.
    FLAP_LINK = "link of a host down for 10 s"
    CUT_LINK = "link of a host down for 60 s"
    KILL_HOST = "host of a group killed, started again"
    KILL_SPARE = "host without a group killed, started again"
    KILL_GCS = "control store of Ray killed"
    # These faults are injected only during the recovery from another fault.
    CAPTURE_DEATH = "a rank of the replacement dies in its capture"
    CAPTURE_MEMORY = "memory of the replacement runs out in its capture"


# These faults end a group, which the service then replaces.
GROUP_ENDING = (
    Kind.KILL_WORKER,
    Kind.PREFILL_DEATH,
    Kind.KILL_ENGINE,
    Kind.STOP_WORKER,
    Kind.STOP_ENGINE,
    Kind.STALL,
)
IN_RECOVERY = (Kind.CAPTURE_DEATH, Kind.CAPTURE_MEMORY, Kind.KILL_WORKER, Kind.KILL_ENGINE)
FILE_FAULTS = (Kind.SPOILT_FILES, Kind.CUT_FILES, Kind.LOST_FILES)
HOST_FAULTS = (
    Kind.FLAP_LINK,
    Kind.CUT_LINK,
    Kind.KILL_HOST,
    Kind.KILL_SPARE,
    Kind.KILL_GCS,
)
FIRSTS = tuple(kind for kind in Kind if kind not in (*IN_RECOVERY[:2], *FILE_FAULTS, *HOST_FAULTS))
MAX_TARGET = 1 << 16


@dataclass(frozen=True)
class Fault:
    """A fault, or a pair of faults.

    Attributes:
        second: a fault that is injected during the recovery from the first fault; None if there is
            no second fault. A fault of a capture is injected during a capture. Any other second
            fault is injected when the service notices the first fault.
    """

    kind: Kind
    second: Kind | None = None

    def __str__(self) -> str:
        return self.kind.value if self.second is None else f"{self.kind.value}; {self.second.value}"


@dataclass(frozen=True)
class Strike:
    """One fault of a plan.

    Attributes:
        after_deltas: the fault is injected when the clients have received this number of deltas,
            counted over all streams.
        target: index of the process that is hit, modulo the number of processes that can be hit.
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
    """Return ``count`` strikes. They consist of rounds; each round contains all faults in a random
    order.

    Args:
        max_deltas: the largest possible value of ``Strike.after_deltas``.
        kinds: the possible kinds of a strike's first fault.
    """
    chance = random.Random(seed)
    strikes: list[Strike] = []
    while len(strikes) < count and kinds:
        for fault in _round(chance, kinds):
            after = chance.randint(1, max_deltas)
            strikes.append(Strike(len(strikes) + 1, fault, after, chance.randrange(MAX_TARGET)))
    return strikes[:count]


def _round(chance: random.Random, kinds: Sequence[Kind]) -> list[Fault]:
    """Return a single fault of each kind, and then pairs of faults. Each possible second fault is
    in one pair, together with a first fault that ends a group.
    """
    alone = [Fault(kind) for kind in kinds]
    ending = [kind for kind in kinds if kind in GROUP_ENDING]
    pairs = [Fault(chance.choice(ending), second) for second in IN_RECOVERY if ending]
    chance.shuffle(alone)
    chance.shuffle(pairs)
    return alone + pairs
