"""How each row wants to be sampled, in columns: a step gathers them without Python for each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_aclgraph.ints import IntArray
from dist_aclgraph.steps.step import RowSampling

# Of a row, the fields of RowSampling that the sampler reads as numbers.
COLUMNS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("seed", np.int64),
        ("logprobs", np.int32),
        ("num_prompt_tokens", np.int32),
        ("min_tokens", np.int32),
        ("has_penalties", np.bool_),
    ]
)


@dataclass(frozen=True)
class SamplingPlaces:
    """Places that are sampled in another way than by the most probable token.

    Attributes:
        table: of all rows.
        rows: [n], row of each place.
        positions: [n], of the tokens that are sampled: drafts before them count.
        settings: [n] records of COLUMNS.
    """

    table: SamplingTable
    rows: IntArray
    positions: IntArray
    settings: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return one of COLUMNS, [n], apart from the others."""
        return self.settings[name].copy()

    def suppressed(self) -> Iterator[tuple[int, int]]:
        """Yield index and token of each end token that comes too early."""
        num_output_tokens = self.positions - self["num_prompt_tokens"]
        for index in np.flatnonzero(num_output_tokens < self["min_tokens"]).tolist():
            for token in self.table.suppressed[int(self.rows[index])]:
                yield index, token


class SamplingTable:
    """Owns the sampling parameters of all rows.

    Attributes:
        is_plain: [max_rows], whether a row wants the most probable token and nothing else.
        may_draft: [max_rows], whether drafts of a row may pass: penalties depend on them.
        suppressed: by row, tokens that must not come before ``min_tokens``.
    """

    def __init__(self, max_rows: int) -> None:
        self._settings = np.zeros(max_rows, COLUMNS)
        self.is_plain = np.ones(max_rows, bool)
        self.may_draft = np.ones(max_rows, bool)
        self.suppressed: dict[int, tuple[int, ...]] = {}

    def set(self, row: int, sampling: RowSampling) -> None:
        """Give a row its parameters."""
        self._settings[row] = tuple(getattr(sampling, name) for name in COLUMNS.names or ())
        self.is_plain[row] = sampling.is_plain
        self.may_draft[row] = not sampling.has_penalties
        self.suppressed[row] = sampling.suppressed

    def places(self, rows: IntArray, positions: IntArray) -> SamplingPlaces:
        """Return what a step samples.

        Args:
            rows, positions: [n], see ``SamplingPlaces``.
        """
        return SamplingPlaces(self, rows, positions, self._settings[rows])
