"""The states of a deployment and the allowed transitions, as one table."""

from __future__ import annotations

from enum import Enum

from dist_aclgraph.errors import DistAclGraphError


class State(Enum):
    """The states of a deployment.

    PLACING: Ray looks for NPUs and starts one worker actor for each NPU.
    JOINING: workers open their devices and form the HCCL groups.
    LOADING: each worker reads its slice of the weights.
    NEGOTIATING: one graph plan is computed from the resources that the ranks offer; every rank
        confirms the plan's hash.
    CAPTURING: all ranks capture the buckets in lockstep, the largest bucket first.
    SERVING: steps run.
    RECOVERING: all groups are lost. New groups are started instead, and requests wait for them.
    DRAINING: no new requests are accepted, and running requests are finished.
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


# After an error, STOPPED can follow every state. No state follows STOPPED. While the deployment is
# SERVING or RECOVERING, new groups also pass through phases such as LOADING, but these phases are
# not recorded as states of the deployment.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PLACING: frozenset({State.JOINING, State.STOPPED}),
    State.JOINING: frozenset({State.LOADING, State.STOPPED}),
    State.LOADING: frozenset({State.NEGOTIATING, State.STOPPED}),
    State.NEGOTIATING: frozenset({State.CAPTURING, State.SERVING, State.STOPPED}),
    # If the capture of a bucket fails, buckets are removed from the plan, and the ranks confirm the
    # new plan.
    State.CAPTURING: frozenset({State.NEGOTIATING, State.SERVING, State.STOPPED}),
    State.SERVING: frozenset({State.RECOVERING, State.DRAINING, State.STOPPED}),
    State.RECOVERING: frozenset({State.SERVING, State.STOPPED}),
    State.DRAINING: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
}


class IllegalTransitionError(DistAclGraphError):
    """A bug in the controller: the table does not allow the transition."""


def advance(current: State, to: State) -> State:
    """Return ``to`` if the table allows the transition.

    Raises:
        IllegalTransitionError: the table does not allow the transition.
    """
    if to not in TRANSITIONS[current]:
        raise IllegalTransitionError(f"no way leads from {current.name} to {to.name}")
    return to
