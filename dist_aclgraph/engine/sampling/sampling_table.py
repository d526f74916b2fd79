"""The sampling parameters of rows, stored in columns, so that a step needs no Python loop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
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
        ("embeds", np.bool_),
    ]
)


class Bias(NamedTuple):
    """Numbers that are added to the logits of a row.

    Attributes:
        tokens: [n] int32; values: [n] float32, added to the logits of these tokens.
        of_others: the number that is added to the logits of all tokens that are not in ``tokens``:
            -inf if only ``tokens`` are allowed, otherwise 0.
    """

    tokens: IntArray
    values: npt.NDArray[np.float32]
    of_others: float

    @classmethod
    def of_row(cls, sampling: RowSampling) -> Bias:
        tokens = unpack_ints(sampling.biased)
        values = np.frombuffer(sampling.biases, "<f4").astype(np.float32)
        if not sampling.allowed:
            return cls(tokens, values, 0.0)
        allowed = np.unique(unpack_ints(sampling.allowed))
        given = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        kept = [given.get(token, 0.0) for token in allowed.tolist()]
        return cls(allowed, np.array(kept, np.float32), -np.inf)


class SamplingTable:
    """Owns the sampling parameters of all rows.

    Attributes:
        is_plain: [max_rows], whether the sampled token of a row is always the most probable token,
            and the row needs no log-probabilities.
        may_draft: [max_rows], whether drafts of a row may be accepted. False if the row has
            penalties, or bad words of several tokens. Also false if the row's masks take long to
            compute, or if its output format and biases together may forbid every token after a
            draft.
        has_penalties: [max_rows], whether a row has a penalty.
        reports_prompts: whether at least one request asks for log-probabilities of its prompt.
        has_embeddings: whether at least one request asks for an embedding.
        is_all_plain: whether ``is_plain`` is true for every row.
        all_may_draft: whether ``may_draft`` is true for every row.
        suppressed: for each row, the tokens that are forbidden while the output has fewer than
            ``min_tokens`` tokens.
        biases: the biases of the rows that have any; the keys are rows.
        bad_words: the bad words that have several tokens; the keys are rows.
        version: number of parameter changes until now. Readers compare versions to find out whether
            parameters of at least one row have changed.
    """

    def __init__(self, max_rows: int) -> None:
        self._settings = np.zeros(max_rows, COLUMNS)
        self._settings["prompt_logprobs"] = -1
        self.is_plain = np.ones(max_rows, bool)
        self.may_draft = np.ones(max_rows, bool)
        self.is_all_plain = self.all_may_draft = True
        self.reports_prompts = self.has_embeddings = False
        self.has_penalties = np.zeros(max_rows, bool)
        self.suppressed: dict[int, tuple[int, ...]] = {}
        self.biases: dict[int, Bias] = {}
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.version = 0

    def set(self, row: int, sampling: RowSampling) -> None:
        self.version += 1
        reported = self._settings["prompt_logprobs"]
        self._settings[row] = tuple(getattr(sampling, name) for name in COLUMNS.names or ())
        self.reports_prompts = bool((reported >= 0).any())
        self.has_embeddings = bool(self._settings["embeds"].any())
        self.is_plain[row] = sampling.is_plain
        self.has_penalties[row] = sampling.has_penalties
        structure = sampling.structure
        may_forbid_all = structure is not None and (sampling.allowed or sampling.biased)
        # If masks take long to compute, only the first token that a step samples for the row gets a
        # mask. So no draft of the row may be accepted.
        is_slow = structure is not None and structure.is_slow
        self.may_draft[row] = not (
            sampling.has_penalties or sampling.bad_words or may_forbid_all or is_slow
        )
        self.is_all_plain, self.all_may_draft = (
            bool(self.is_plain.all()),
            bool(self.may_draft.all()),
        )
        self.suppressed[row] = sampling.suppressed
        self.biases.pop(row, None)
        if sampling.biased or sampling.allowed:
            self.biases[row] = Bias.of_row(sampling)
        self.bad_words.pop(row, None)
        if sampling.bad_words:
            self.bad_words[row] = sampling.bad_words

    def settings(self, rows: IntArray) -> npt.NDArray[np.void]:
        """Return the parameters of rows, [n] records with the fields of COLUMNS."""
        settings: npt.NDArray[np.void] = self._settings[rows]
        return settings
