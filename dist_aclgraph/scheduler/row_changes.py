"""RowChanges: the changes of a rank's rows that were not yet sent to the workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dist_aclgraph.arrays.ints import IntArray, pack_ints
from dist_aclgraph.scheduler.rank_step import NewTokens, RankStep, StepBuilder
from dist_aclgraph.scheduler.rows import RunningRows
from dist_aclgraph.steps.step import RankBatch, RowStart

NO_PAIRS: IntArray = np.empty((0, 2), np.int32)


class RowChanges:
    """Collects new tokens and rows, and puts them into the next message to the rank's workers.

    Args:
        dp_rank: index of the data-parallel rank in its group.
    """

    def __init__(self, dp_rank: int, rows: RunningRows) -> None:
        self._dp_rank = dp_rank
        self._rows = rows
        self._appended: IntArray = NO_PAIRS  # [n, 2], row and token id of each new token
        # Rows that must be sent to the workers again, with all of their tokens.
        self._renewed: list[RowStart] = []
        self._knows_nothing = False  # whether workers have lost all rows

    def add_tokens(self, row: IntArray, new: NewTokens) -> None:
        """Add the new tokens of a step. ``row`` is [n]: the rows for which tokens were sampled."""
        appended = np.empty((len(new.token_ids), 2), np.int32)
        appended[:, 0] = row if new.counts is None else np.repeat(row, new.counts)
        appended[:, 1] = new.token_ids
        self.append(appended)

    def append(self, appended: IntArray) -> None:
        """Add new tokens; ``appended`` is [n, 2], row and token id of each token."""
        if len(self._appended):  # tokens of an earlier step that were not sent yet
            appended = np.concatenate([self._appended, appended])
            appended = appended[np.argsort(appended[:, 0], kind="stable")]
        self._appended = appended

    def renew(self, index: int) -> None:
        """Let the next message contain all tokens of a running request's row."""
        self._rows.settle(index)
        request = self._rows.requests[index]
        self._renewed.append(request.start(self._dp_rank, request.row))

    def drop(self, rows: Collection[int]) -> None:
        """Drop the collected changes of these rows."""
        self._appended = self._appended[~np.isin(self._appended[:, 0], list(rows))]
        self._renewed = [start for start in self._renewed if start.row not in rows]

    def lose_rows(self) -> None:
        """Let the next message contain all rows with all tokens, because workers have lost the
        rows.
        """
        self._appended = NO_PAIRS
        self._knows_nothing = True

    def message(
        self, builder: StepBuilder, step: RankStep, cleaned: Sequence[int], kept: bytes
    ) -> RankBatch:
        """Return the message for a decided step. The message contains all changes until now.

        Args:
            cleaned: the blocks that workers set to zero before the step.
            kept: int32 pairs, row and checkpoint. After the step, the row's state is copied to the
                checkpoint.
        """
        renewed, self._renewed = self._renewed, []
        restored = pack_ints(builder.restored) if builder.restored else b""
        if self._knows_nothing:
            self._knows_nothing = False
            return RankBatch(
                step.records.tobytes(),
                started=self._every_row(builder),
                cleaned=pack_ints(cleaned),
                restored=restored,
                kept=kept,
            )
        return RankBatch(
            step.records.tobytes(),
            self.take_tokens(),
            pack_ints(builder.blocks) if builder.blocks else b"",
            (*renewed, *builder.started),
            pack_ints(cleaned) if cleaned else b"",
            restored,
            kept,
        )

    def take_tokens(self) -> bytes:
        """Remove and return the collected tokens, as int32 pairs of row and token id."""
        appended, self._appended = self._appended, NO_PAIRS
        return appended.tobytes()

    def _every_row(self, builder: StepBuilder) -> tuple[RowStart, ...]:
        """Return all rows with all of their tokens and blocks."""
        started = {start.row for start in builder.started}
        for index in range(len(self._rows)):
            self._rows.settle(index)
        running = (
            request.start(self._dp_rank, request.row)
            for request in self._rows.requests
            if request.row not in started
        )
        return (*running, *builder.started)
