"""The sampling parameters of rows, in columns: a step gathers them without Python per row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dist_aclgraph.ints import IntArray
from dist_aclgraph.steps.step import RowSampling

# The fields of RowSampling that the sampler reads as numbers.
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
        ("prompt_logprobs", np.int32),
        ("num_prompt_tokens", np.int32),
        ("min_tokens", np.int32),
        ("has_penalties", np.bool_),
    ]
)


class SamplingTable:
    """Owns the sampling parameters of all rows.

    Attributes:
        is_plain: [max_rows], whether a row simply takes the most probable token.
        may_draft: [max_rows], whether drafts of a row may be accepted; with penalties they may not.
        reports_prompts: whether any row wants log-probabilities of its prompt.
        is_all_plain, all_may_draft: whether this holds for every row.
        suppressed: by row, tokens that are forbidden before ``min_tokens``.
        version: number of parameter changes; while it is the same, no row has changed.
    """

    def __init__(self, max_rows: int) -> None:
        self._settings = np.zeros(max_rows, COLUMNS)
        self._settings["prompt_logprobs"] = -1
        self.is_plain = np.ones(max_rows, bool)
        self.may_draft = np.ones(max_rows, bool)
        self.is_all_plain = self.all_may_draft = True
        self.reports_prompts = False
        self.suppressed: dict[int, tuple[int, ...]] = {}
        self.version = 0

    def set(self, row: int, sampling: RowSampling) -> None:
        """Set the parameters of a row."""
        self.version += 1
        reported = self._settings["prompt_logprobs"]
        self._settings[row] = tuple(getattr(sampling, name) for name in COLUMNS.names or ())
        self.reports_prompts = bool((reported >= 0).any())
        self.is_plain[row] = sampling.is_plain
        self.may_draft[row] = not sampling.has_penalties
        self.is_all_plain, self.all_may_draft = (
            bool(self.is_plain.all()),
            bool(self.may_draft.all()),
        )
        self.suppressed[row] = sampling.suppressed

    def settings(self, rows: IntArray) -> npt.NDArray[np.void]:
        """Return the parameters of rows, [n] records of COLUMNS."""
        settings: npt.NDArray[np.void] = self._settings[rows]
        return settings
