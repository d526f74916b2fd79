"""Computes which slots of one rank's recurrent-state cache belong to a row or to a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import Config


@dataclass(frozen=True, kw_only=True)
class StateSlots:
    """The slots of the state cache: slot 0 is for padding. The slots of the rows follow, then the
    slots of the checkpoints.

    A row has one slot for its last token and one slot for each draft. So a rejected draft does not
    overwrite a state that is still needed. The first of these slots is the row's base.

    Attributes:
        num_places: number of slots of one row, which is 1 + the number of drafts of a request.
    """

    num_rows: int
    num_places: int
    num_checkpoints: int

    @classmethod
    def from_config(cls, config: Config) -> StateSlots:
        """Return the slots of one rank, for a model that has recurrent state."""
        return cls(
            num_rows=config.scheduler.max_num_seqs,
            num_places=config.speculative.num_tokens + 1,
            num_checkpoints=num_checkpoints(config),
        )

    @property
    def count(self) -> int:
        return 1 + self.num_rows * self.num_places + self.num_checkpoints

    def bases(self, rows: IntArray) -> IntArray:
        """Return the first slot of each row."""
        return 1 + rows * self.num_places

    def checkpoints(self, numbers: IntArray) -> IntArray:
        return 1 + self.num_rows * self.num_places + numbers


def num_checkpoints(config: Config) -> int:
    """Return how many checkpoints one rank keeps, for a model that has recurrent state."""
    if not config.shares_prefixes:
        return 0
    count = config.kv.checkpoints
    return config.scheduler.max_num_seqs if count is None else count
