"""How a lockstep group comes back from a failure: one pure function of what is known of it.

RESUME keeps all processes: their devices' work is aborted, communicators are resumed, and the steps
that were interrupted run again; weights, KV and graphs stay. RECOMPUTE does the same without the
KV: requests are computed again from their first token. REJOIN keeps the processes that live, with
their weights where these are whole: what is lost is started in its place, and all join a group
anew; KV and graphs are gone. REBUILD replaces the group by another one, somewhere. It is what all
else ends in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.topology import GroupRank

Way = Literal["RESUME", "RECOMPUTE", "REJOIN", "REBUILD"]

# After so many steps without a failure, the next one is the first in a row again.
SOUND_STEPS = 100

# How often in a row a group resumes after each kind of failure; 0 never does. A second failure
# right behind the first says that resuming has not mended it.
TRIES: dict[DeviceFault, int] = {
    "stopped": 2,  # the peers of a rank that failed, which says how often
    "link": 2,  # links flap
    "remote": 1,  # the peers say more
    "retry": 1,
    "suspect": 1,
    "operator": 1,  # what fails again is its input or the chip
    "uce_kv": 1,  # the memory is repaired, and its KV computed again
    "uce_tensor": 0,  # what lay there is gone: weights, or what graphs have in fixed places
    "uce": 0,  # likewise, and nobody knows what that was
    "ecc": 0,  # nothing repairs it
}

# Faults behind which the KV cache does not hold what was written to it.
LOSES_KV: frozenset[DeviceFault | None] = frozenset({"uce_kv"})

# Faults behind which a process may go on in another group, as its memory holds what was loaded, or
# is known not to where it is given back. An error that is not known is none of them.
MAY_SURVIVE: frozenset[DeviceFault | None] = frozenset(
    {"stopped", "link", "remote", "retry", "operator", "uce_kv", "uce_tensor"}
)

# A group that is lost sooner than this after survivors have joined it is not given to them again.
SOUND_S = 60.0


@dataclass(frozen=True)
class Failure:
    """What is known of a group that has failed.

    Attributes:
        faults: of ranks that have reported one; None is an error that is not known.
        lost: ranks whose process is gone, or does not answer.
        in_a_row: how often the group has resumed since it was last sound.
        may_resume: whether the configuration wants devices to be stopped and to go on.
        is_over: whether the group's epoch has ended: its requests go on elsewhere already.
        size: ranks of the group.
        served_s: since survivors of another group have joined this one; None if none have.
    """

    faults: Mapping[GroupRank, DeviceFault | None]
    lost: frozenset[GroupRank] = frozenset()
    in_a_row: int = 0
    may_resume: bool = True
    is_over: bool = False
    size: int = 1
    served_s: float | None = None


def way_back(failure: Failure) -> Way:
    """Return the cheapest way back that is safe."""
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
