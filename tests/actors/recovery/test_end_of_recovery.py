"""When the limit of restarts is reached, the deployment's error names this limit once, and also
names the last failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.controller.upkeep import Change, Upkeep
from dist_aclgraph.config import load_config
from tests.actors.recovery.test_recovery_model import BegunChange, Groups
from tests.serve.conftest import CONFIG

LIMIT = "recovery.restarts_per_hour allows 2"


class Recovery:
    """A deployment with one group. Each time the group serves, it is lost at once."""

    def __init__(self, *, comes_up: bool) -> None:
        config = load_config(CONFIG, {"recovery.restarts_per_hour": 2})
        self.groups = Groups(1, config, comes_up=comes_up)
        self.now_s = 0.0
        self.upkeep = Upkeep(
            cast(ServingGroups, self.groups),
            lambda serves: None,
            lambda: self.now_s,
            self._begin,
            cast(Any, lambda groups: (0, 0)),
        )

    def _begin(self, work: Callable[[], None]) -> Change:
        change = BegunChange(work)
        change.end()
        return change

    def run(self) -> str:
        """Lose every group until the deployment ends; return the reason for its end."""
        while not self.upkeep.failure:
            for group in self.groups.taking:
                group.lost_because = "the process died"
            self.now_s += 1.0
            self.upkeep.look()
        self.upkeep.look()
        return self.upkeep.failure


def test_the_limit_is_named_once_if_every_restart_succeeded() -> None:
    failure = Recovery(comes_up=True).run()

    assert failure.count(LIMIT) == 1
    assert failure.endswith(f"it is not started again: {LIMIT}")


def test_the_last_failure_of_a_restart_is_named_with_the_limit() -> None:
    failure = Recovery(comes_up=False).run()

    assert failure.count(LIMIT) == 1
    assert failure.endswith(f"{LIMIT}, and the last failed: rank 0 in CAPTURING: the process died")
