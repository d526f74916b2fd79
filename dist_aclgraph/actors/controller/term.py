"""What each controller of a deployment takes over from the previous ones."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import Config

# More than a controller ever has, so that no two terms have the same numbers.
GROUPS_OF_A_TERM, VERSIONS_OF_A_TERM = 1_000, 1 << 32


@dataclass(frozen=True)
class Term:
    """What a controller takes over from the previous ones, which are dead.

    Attributes:
        number: how many there were.
        token: the deployment's, which its clients have.
        max_model_len: the promise to clients; 0 before there are any.
        num_groups: how many ought to take requests; 0 for the number in the configuration.
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
    """What the next controller would begin with, if this one died now."""

    config: Config
    num_groups: int
