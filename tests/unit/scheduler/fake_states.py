"""The recurrent states of a fake worker. A state is a checksum of all tokens that the worker has
run, in their order.

If a token is run twice, or after the state of another request, the checksum is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.steps.step import RankBatch

LOST = -3  # the state that an abort of the device leaves


def checksum(tokens: Sequence[int], state: int = 0) -> int:
    return zlib.crc32(np.asarray(tokens, dtype="<i4").tobytes(), state)


class FakeStates:
    """The states of rows, and the checkpoints of one worker.

    A row that verifies drafts keeps the state after its last token and after each draft. Its next
    step starts from the state after the last accepted token.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._passed: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}
        self._kept: list[list[int]] = []  # for each step, the checkpoints that it has written
        self._spoilt: set[int] = set()  # rows whose last tokens were sampled without a mask

    def begin(self, batch: RankBatch) -> None:
        """Copy checkpoints to rows, as a worker does before a step."""
        self._spoilt -= {start.row for start in batch.started}
        for row, checkpoint in unpack_ints(batch.restored, 2).tolist():
            assert row in {start.row for start in batch.started}, "the row does not begin"
            self._rows[row] = [self._checkpoints[checkpoint]]
            self._passed[row] = 0

    def run(self, row: int, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Run ``tokens`` of a prompt; ``before`` contains all earlier tokens of the prompt."""
        state = self._state_of(row, before)
        self._rows[row], self._passed[row] = [checksum(tokens, state)], 0

    def verify(self, row: int, before: Sequence[int], tokens: Sequence[int], passed: int) -> None:
        """Run the last token of a row and its drafts (``tokens``). ``passed`` is the number of
        drafts that are accepted.
        """
        state, states = self._state_of(row, before), []
        for token in tokens:
            state = checksum([token], state)
            states.append(state)
        self._rows[row], self._passed[row] = states, passed

    def end(self, batch: RankBatch) -> None:
        """Copy states of rows to checkpoints, as a worker does after a step."""
        kept = unpack_ints(batch.kept, 2).tolist()
        for row, checkpoint in kept:
            assert row not in self._spoilt
            self._checkpoints[checkpoint] = self._rows[row][self._passed[row]]
        self._kept.append([checkpoint for _, checkpoint in kept])

    def spoil(self, row: int) -> None:
        """Record that the state of a row is invalid until the row begins again."""
        self._spoilt.add(row)

    def resume(self, num_in_flight: int) -> None:
        """Lose the states of all rows, and the checkpoints that steps in flight have written."""
        for kept in self._kept[len(self._kept) - num_in_flight :]:
            self._checkpoints.update(dict.fromkeys(kept, LOST))
        self._rows.clear()

    def contents(self, checkpoint: int) -> int:
        return self._checkpoints[checkpoint]

    def write(self, checkpoint: int, contents: int) -> None:
        self._checkpoints[checkpoint] = contents

    def lose(self) -> None:
        self._rows.clear()
        self._checkpoints.clear()

    def _state_of(self, row: int, before: Sequence[int]) -> int:
        """Check and return the state of the row. ``before`` contains the tokens that the row has
        run; the state is 0 if ``before`` is empty.
        """
        if not before or row in self._spoilt:
            return 0
        state = self._rows[row][self._passed[row]]
        assert state == checksum(before), f"row {row} has the state of other tokens"
        return state
