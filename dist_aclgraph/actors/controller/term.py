"""The values that a deployment's controller takes over from a dead controller."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.config import Config

# The number of a controller's first group is a multiple of GROUPS_OF_A_TERM. The version of its
# first group list is a multiple of VERSIONS_OF_A_TERM. A controller never creates so many groups or
# versions that it reaches the next multiple.
GROUPS_OF_A_TERM, VERSIONS_OF_A_TERM = 1_000, 1 << 32


@dataclass(frozen=True)
class Term:
    """The values that a controller takes over from the previous controllers, which are dead.

    Attributes:
        number: how many previous controllers there were.
        token: the deployment's connection token, which its clients know.
        max_model_len: the context length that was promised to clients; 0 before the first promise.
        num_groups: how many groups should accept requests; 0 means the number in the configuration.
        slowest_start_s: how long the slowest start of a group's processes took, in seconds; None if
            no group has started yet. The time limit of later starts depends on this time
            (``StartLimit``).
    """

    number: int
    token: str
    max_model_len: int = 0
    num_groups: int = 0
    slowest_start_s: float | None = None

    @property
    def first_group(self) -> int:
        """The number of this controller's first group. No other controller of the deployment uses
        this number.
        """
        return self.number * GROUPS_OF_A_TERM

    @property
    def first_version(self) -> int:
        """The version of this controller's first group list. This version is higher than all
        versions of previous controllers, because clients ignore lower versions.
        """
        return self.number * VERSIONS_OF_A_TERM

    def next(self, handover: Handover) -> Term:
        """Return the term of the controller that takes over."""
        return replace(
            self,
            number=self.number + 1,
            num_groups=handover.num_groups,
            slowest_start_s=handover.slowest_start_s,
        )


@dataclass(frozen=True)
class Handover:
    """The values that the next controller would take over if this controller died now."""

    config: Config
    num_groups: int
    slowest_start_s: float | None = None
