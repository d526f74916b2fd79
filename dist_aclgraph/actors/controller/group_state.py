"""The states of one lockstep group and the allowed transitions, as one table."""

from __future__ import annotations

from enum import Enum


class GroupState(Enum):
    """The states of a lockstep group.

    STARTING: the group's ranks start. Clients do not know the group yet.
    SERVING: the group accepts requests.
    DRAINING: the group accepts no new requests, and finishes its running requests.
    LOST: a rank or the engine has failed. Other groups continue the requests. Workers that are
        still alive can join a new group.
    DETACHED: the group is lost. Its surviving workers have left the group, and wait to join a new
        group.
    ABANDONED: the group is lost. All its workers were killed, and its NPUs are free.
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
