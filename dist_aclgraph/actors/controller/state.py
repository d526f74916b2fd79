"""The states of a deployment and what leads from one to the next, as one table."""

from __future__ import annotations

from enum import Enum

from dist_aclgraph.errors import DistAclGraphError


class State(Enum):
    """The states of a deployment.

    PLACING: Ray looks for NPUs and starts one worker actor on each.
    JOINING: workers open their device and form the HCCL groups.
    LOADING: workers read their slices of the weights.
    NEGOTIATING: offers become one plan; every rank confirms its hash.
    CAPTURING: buckets are captured in lockstep, largest first.
    SERVING: steps run.
    RECOVERING: all groups are lost, and others are started in their places; requests wait.
    DRAINING: no new requests; running ones end.
    STOPPED: all processes have ended.
    """

    PLACING = "PLACING"
    JOINING = "JOINING"
    LOADING = "LOADING"
    NEGOTIATING = "NEGOTIATING"
    CAPTURING = "CAPTURING"
    SERVING = "SERVING"
    RECOVERING = "RECOVERING"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"


# An error may end any state; STOPPED ends all. The phases of groups that are started while others
# serve, or ought to, are their own.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PLACING: frozenset({State.JOINING, State.STOPPED}),
    State.JOINING: frozenset({State.LOADING, State.STOPPED}),
    State.LOADING: frozenset({State.NEGOTIATING, State.STOPPED}),
    State.NEGOTIATING: frozenset({State.CAPTURING, State.SERVING, State.STOPPED}),
    # A bucket that failed shrinks the plan, and ranks confirm the new one.
    State.CAPTURING: frozenset({State.NEGOTIATING, State.SERVING, State.STOPPED}),
    State.SERVING: frozenset({State.RECOVERING, State.DRAINING, State.STOPPED}),
    State.RECOVERING: frozenset({State.SERVING, State.STOPPED}),
    State.DRAINING: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
}


class IllegalTransitionError(DistAclGraphError):
    """A bug in the controller: the table has no such edge."""


def advance(current: State, to: State) -> State:
    """Return ``to`` if the table allows it.

    Raises:
        IllegalTransitionError: it does not.
    """
    if to not in TRANSITIONS[current]:
        raise IllegalTransitionError(f"no way leads from {current.name} to {to.name}")
    return to
