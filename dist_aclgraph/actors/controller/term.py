"""The values that each controller of a deployment takes over from previous controllers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.config import Config

# Each term begins to number groups and versions at a multiple of these values. A controller makes
# fewer groups and versions, so two terms never use the same number.
GROUPS_OF_A_TERM, VERSIONS_OF_A_TERM = 1_000, 1 << 32


@dataclass(frozen=True)
class Term:
    """The values that a controller takes over from the previous controllers, which are dead.

    Attributes:
        number: how many previous controllers there were.
        token: the deployment's connection token, which its clients know.
        max_model_len: the context length that clients were promised; 0 before the first promise.
        num_groups: how many groups should accept requests; 0 for the number in the configuration.
        slowest_start_s: how long the slowest start of a group's processes took; None before any
            start. This time limits later starts (``StartLimit``).
    """

    number: int
    token: str
    max_model_len: int = 0
    num_groups: int = 0
    slowest_start_s: float | None = None

    @property
    def first_group(self) -> int:
        """The number of this term's first group. Two terms never use the same number."""
        return self.number * GROUPS_OF_A_TERM

    @property
    def first_version(self) -> int:
        """The first version of this term's group lists, because clients ignore older versions."""
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
