"""The states of one lockstep group and what leads from one to the next, as one table."""

from __future__ import annotations

from enum import Enum


class GroupState(Enum):
    """The states of a lockstep group.

    STARTING: its ranks start; no client knows of it.
    SERVING: it takes requests.
    DRAINING: it takes no new requests, and finishes its own.
    LOST: a rank or the engine has failed, and its requests go on in other groups. Workers that
        still live may join another group.
    DETACHED: these workers have left the group, and wait for another one.
    ABANDONED: its workers are killed, and its NPUs free.
    """

    STARTING = "STARTING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    LOST = "LOST"
    DETACHED = "DETACHED"
    ABANDONED = "ABANDONED"


GROUP_TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.STARTING: frozenset({GroupState.SERVING}),
    GroupState.SERVING: frozenset({GroupState.DRAINING, GroupState.LOST}),
    GroupState.DRAINING: frozenset({GroupState.LOST}),
    GroupState.LOST: frozenset({GroupState.DETACHED, GroupState.ABANDONED}),
    GroupState.DETACHED: frozenset({GroupState.ABANDONED}),
    GroupState.ABANDONED: frozenset(),
}
