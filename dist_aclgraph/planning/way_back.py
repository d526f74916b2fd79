"""Chooses how a lockstep group recovers from a failure. One pure function decides.

With RESUME, all processes continue: the work of their devices is aborted, their communicators are
resumed, and the interrupted steps run again. Weights, KV and graphs stay valid. RECOMPUTE is like
RESUME, but the KV is lost, so requests are computed again from their first token. With REJOIN, the
processes that still run keep their weights. Lost processes are started again on the same NPUs. All
of these processes join a new group. KV and graphs are lost. REBUILD replaces the group by another
group, which can run on other NPUs. If RESUME, RECOMPUTE or REJOIN fails, REBUILD follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.topology import GroupRank

Way = Literal["RESUME", "RECOMPUTE", "REJOIN", "REBUILD"]

# after this number of steps without a failure, the next failure counts as a first failure
SOUND_STEPS = 100

# For each kind of fault, the maximum number of consecutive times that a group is resumed; 0 means
# never. If a group fails again soon after it was resumed, the fault still exists.
TRIES: dict[DeviceFault, int] = {
    # The peers of a failed rank report "stopped". The smallest limit of all reported faults
    # applies, so the limit of "stopped" is at least as large as every other limit.
    "stopped": 2,
    "link": 2,  # a link may fail only for a moment, and work again afterwards
    "remote": 1,  # perhaps another rank failed, and reports the fault itself
    "retry": 1,
    "suspect": 1,
    "operator": 1,  # if the failure happens again, its cause is the operator's input or the chip
    "uce_kv": 1,  # the memory can be repaired, and the KV computed again (RECOMPUTE)
    "uce_tensor": 0,  # weights, or other tensors whose addresses are in graphs, are lost
    "uce": 0,  # it is unknown which tensors are lost
    "ecc": 0,  # The memory cannot be repaired.
}

# Faults after which the KV cache may have lost its values.
LOSES_KV: frozenset[DeviceFault | None] = frozenset({"uce_kv"})

# Faults after which a process may join another group. After these faults, the weights are intact,
# or the faulty part of the memory is known and can be released. After an unknown error, a process
# must not join another group.
MAY_SURVIVE: frozenset[DeviceFault | None] = frozenset(
    {"stopped", "link", "remote", "retry", "operator", "uce_kv", "uce_tensor"}
)

# Seconds. If a group fails within this time after a REJOIN, the processes that still run do not
# join another group.
SOUND_S = 60.0


@dataclass(frozen=True)
class Failure:
    """The known facts about a failed group.

    Attributes:
        faults: the reported faults; the keys are the ranks that have reported a fault. The value
            None means an unknown error.
        lost: ranks whose process has exited or does not answer.
        in_a_row: number of consecutive times that the group was resumed. ``SOUND_STEPS`` steps
            without a failure reset this number.
        may_resume: whether the configuration allows stopping and restarting devices.
        is_over: whether the group's epoch has ended. If true, its requests already run in other
            groups.
        size: number of ranks of the group.
        served_s: seconds since processes of an earlier group joined this group (REJOIN); None if
            the group began with new processes only.
    """

    faults: Mapping[GroupRank, DeviceFault | None]
    lost: frozenset[GroupRank] = frozenset()
    in_a_row: int = 0
    may_resume: bool = True
    is_over: bool = False
    size: int = 1
    served_s: float | None = None


def way_back(failure: Failure) -> Way:
    """Return the cheapest safe recovery."""
    if not failure.may_resume:
        return "REBUILD"
    if failure.is_over:
        spoiled = {r for r, fault in failure.faults.items() if fault not in MAY_SURVIVE}
        is_hopeless = failure.served_s is not None and failure.served_s < SOUND_S
        has_survivors = len(failure.lost | spoiled) < failure.size
        return "REJOIN" if has_survivors and not is_hopeless else "REBUILD"
    if failure.lost or not failure.faults:
        return "REBUILD"
    tries = [0 if fault is None else TRIES[fault] for fault in failure.faults.values()]
    if failure.in_a_row >= min(tries):
        return "REBUILD"
    return "RECOMPUTE" if LOSES_KV & set(failure.faults.values()) else "RESUME"
