"""A deployment has one controller after another: what each takes over from those before it."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import Config

# More than a controller ever has: their numbers do not meet.
GROUPS_OF_A_TERM, VERSIONS_OF_A_TERM = 1_000, 1 << 32


@dataclass(frozen=True)
class Term:
    """What a controller takes over from those before it, which are dead.

    Attributes:
        number: how many there were.
        token: what clients know of the deployment.
        max_model_len: what they were promised; 0 where there are none yet.
        num_groups: that ought to take requests; 0 for those of the configuration.
    """

    number: int
    token: str
    max_model_len: int = 0
    num_groups: int = 0

    @property
    def first_group(self) -> int:
        """The number of its first group: no other term has groups of the same numbers."""
        return self.number * GROUPS_OF_A_TERM

    @property
    def first_version(self) -> int:
        """Of the list of groups: clients believe no older one than they have."""
        return self.number * VERSIONS_OF_A_TERM


@dataclass(frozen=True)
class Handover:
    """What another controller would have to begin with, if this one died now."""

    config: Config
    num_groups: int
