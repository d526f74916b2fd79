"""Checks that a roll changes only keys that may change. Also writes the error text for a roll that
ended early.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, DistAclGraphError
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.version import build, build_of, hash_sources

# A roll cannot change these keys, because replicas of the ingress read these keys only when they
# start.
OF_THE_INGRESS = (
    "model",
    "model_overrides",
    "chat_template",
    "name",
    "served_model_aliases",
    "task",
    "sampling_defaults",
    "seed",
)


def check_roll(old: Config, new: Config) -> None:
    """Check that groups with another configuration can replace groups of a running service.

    Raises:
        ConfigError: ``new`` changes a key that a running service cannot change; or the version of
            this package has changed.
    """
    for key in OF_THE_INGRESS:
        if getattr(old, key) != getattr(new, key):
            raise ConfigError(
                f"{key} changes, which ingresses have read; start a new service for it"
            )
    if build_of(hash_sources()) != build():
        raise ConfigError(
            f"the service runs dist_aclgraph {build()}, and the files have changed: a roll "
            "changes the configuration only; start a new service for the new version, and stop "
            "this one when the new one serves"
        )


def early_end(
    taking: Sequence[LockstepGroup], planner: Planner, num_wanted: int, cause: DistAclGraphError
) -> str:
    """Return the error text of a failed roll, with the configuration of each group.

    Args:
        taking: the groups that accept requests.
        planner: the planner for the new configuration.
        num_wanted: how many groups should accept requests.
    """
    new = [g.number for g in taking if g.planner is planner]
    old = [g.number for g in taking if g.planner is not planner]
    num_missing = num_wanted - len(taking)
    missing = f", {num_missing} of {num_wanted} groups are missing" if num_missing > 0 else ""
    return (
        f"the roll has ended early: {cause}; {_named(new)} the new configuration, "
        f"{_named(old)} the one from before{missing}; roll again "
        "to go on, or roll back by the other configuration"
    )


def _named(numbers: Sequence[int]) -> str:
    """Return a subject and a verb for these group numbers, e.g. ``groups 0, 2 run``."""
    if len(numbers) == 1:
        return f"group {numbers[0]} runs"
    return f"groups {', '.join(map(str, numbers))} run" if numbers else "no group runs"
