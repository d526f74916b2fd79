"""The recovery of a lockstep group after a failure: one pure function of the known facts.

RESUME keeps all processes: their devices' work is aborted, communicators are resumed, and the
interrupted steps run again; weights, KV and graphs stay. RECOMPUTE does the same without the KV:
requests are computed again from their first token. REJOIN keeps the living processes, with intact
weights: lost processes are started in their places, and all join a new group; KV and graphs are
lost. REBUILD replaces the group by another one, on any places. If one of the others fails, REBUILD
follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.topology import GroupRank

Way = Literal["RESUME", "RECOMPUTE", "REJOIN", "REBUILD"]

# After so many steps without a failure, the next failure counts as the first in a row.
SOUND_STEPS = 100

# How often in a row a group resumes after each kind of failure; 0 means never. A second failure
# directly after the first shows that resuming has not fixed it.
TRIES: dict[DeviceFault, int] = {
    "stopped": 2,  # the peers of a failed rank; the failed rank's kind sets the limit
    "link": 2,  # links may fail for a moment
    "remote": 1,  # the peers report more
    "retry": 1,
    "suspect": 1,
    "operator": 1,  # a repeated failure comes from its input or from the chip
    "uce_kv": 1,  # the memory is repaired, and its KV computed again
    "uce_tensor": 0,  # lost contents: weights, or tensors at fixed addresses of graphs
    "uce": 0,  # the same, with unknown contents
    "ecc": 0,  # cannot be repaired
}

# Faults after which the KV cache may not hold the written values.
LOSES_KV: frozenset[DeviceFault | None] = frozenset({"uce_kv"})

# Faults after which a process may join another group: its memory holds the loaded weights, or the
# faulty part is known and can be released. An unknown error is not among them.
MAY_SURVIVE: frozenset[DeviceFault | None] = frozenset(
    {"stopped", "link", "remote", "retry", "operator", "uce_kv", "uce_tensor"}
)

# If a rejoined group is lost within this time, its survivors do not rejoin again.
SOUND_S = 60.0


@dataclass(frozen=True)
class Failure:
    """The known facts about a failed group.

    Attributes:
        faults: the fault of each rank that reported one; None is an unknown error.
        lost: ranks whose process has exited, or does not answer.
        in_a_row: number of resumptions since the group was last sound.
        may_resume: whether the configuration allows to stop and restart devices.
        is_over: whether the group's epoch has ended, and its requests already continue elsewhere.
        size: ranks of the group.
        served_s: seconds since survivors of another group joined this one; None without survivors.
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
