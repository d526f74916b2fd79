"""A row whose masks may take seconds: a separate thread computes the masks, and the row's request
waits.

A step cannot stop the computation of a mask. The library checks its limits only after each row of
its parsing table. With an ambiguous grammar, one row of this table can take seconds. So a step
waits for the mask only briefly. If the mask is still missing after this wait, the request gets no
token in this step, as if its grammar were not compiled yet. The other requests run.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError

import llguidance
import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.engine.masks.grammar_row import NO_MATCH, GrammarRow, NotReadyError
from dist_aclgraph.engine.masks.grammars import Grammars
from dist_aclgraph.engine.masks.permitted import ALL, BITS, Permitted
from dist_aclgraph.steps.step import RowSampling

PATIENCE_S = 0.005  # seconds that a step waits for the masks of all slow rows


class SlowRow(GrammarRow):
    """A row whose masks are computed by a separate thread. Only that thread uses the matcher."""

    def __init__(
        self,
        sampling: RowSampling,
        matcher: Future[llguidance.LLMatcher] | None,
        end_words: IntArray,
        permitted: Permitted | None,
        grammars: Grammars,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(sampling, matcher, end_words, permitted, is_shared=is_shared)
        self._grammars = grammars
        self._output: list[int] = []  # the output for which ``_mask`` was computed
        self._mask: Future[tuple[IntArray, str]] | None = None
        self._read: list[int] = []  # the tokens that were added to the matcher's state
        self._words: IntArray | None = None  # the mask for the matcher's state, if computed
        self._num_words = len(end_words)
        self._is_dropped = False

    @property
    def is_compiling(self) -> bool:
        return super().is_compiling or (self._mask is not None and not self._mask.done())

    @property
    def error(self) -> str:
        # Only the separate thread may read the matcher; ``fill_aside`` returns the error.
        return ""

    def can_continue(self, sampling: RowSampling, output: list[int]) -> bool:
        """Return whether the next request in the row may use the row's matcher and masks. The
        request for which the last mask was computed may use the matcher and the masks. Another
        request with the same grammar is allowed only if the two requests share a lexer. After a
        failure, only the request whose output caused the failure is allowed. This request then gets
        the reason of the failure.
        """
        is_same = self.structure == sampling.structure and self.begin == sampling.num_prompt_tokens
        mask = self._mask
        has_failed = mask is not None and mask.done() and bool(mask.result()[1])
        serves_others = self.is_shared and not (has_failed or self.complaint)
        is_good = serves_others or self._output == output
        return is_same and is_good and self.free_from == sampling.min_tokens

    def drop(self) -> None:
        """Stop the computation of masks. Call this when the last request of the row has left the
        row.
        """
        self._is_dropped = True
        if self._mask is not None:
            self._mask.cancel()

    def fill_aside(self, output: list[int], words: IntArray, patience_s: float) -> str:
        """Write the mask of the token after ``output`` into ``words``. Return why the matcher has
        failed; "" if it has not failed.

        Args:
            words: [num_words].
            patience_s: maximum wait for the mask, in seconds.

        Raises:
            NotReadyError: the mask is not computed yet.
        """
        if self._mask is None or self._output != output:
            if self.is_compiling:
                raise NotReadyError
            self._output = output
            self._mask = self._grammars.submit_slow(self._compute, output)
        try:
            found, error = self._mask.result(patience_s)
        except NotDoneError:
            raise NotReadyError from None
        words[:] = found
        return error

    def _compute(self, output: list[int]) -> tuple[IntArray, str]:
        """Move the matcher's state to the end of ``output``. Return the mask of the next token, and
        why the matcher has failed ("" if it has not failed).
        """
        pairs = enumerate(zip(self._read, output, strict=False))
        shorter = min(len(self._read), len(output))
        num_same = next((i for i, (old, new) in pairs if old != new), shorter)
        if num_same < len(self._read):
            self._words = None
        self.go_back(num_same)
        del self._read[num_same:]
        for token in [*output[num_same:], None]:
            if self._is_dropped:
                break
            begin_s = time.thread_time()
            words = self._mask_of_state()
            if token is not None:
                is_allowed = words[token // BITS] >> (token % BITS) & 1
                if super().error or not is_allowed or not self.add(token):
                    break
                self._read.append(token)
                self._words = None
            self.charge(time.thread_time() - begin_s, token is not None)
        else:
            return words, super().error
        return np.full(self._num_words, ALL), super().error or NO_MATCH

    def _mask_of_state(self) -> IntArray:
        """Return the mask for the matcher's present state. The mask is computed only once for each
        state.
        """
        if self._words is None:
            words: IntArray = np.full(self._num_words, ALL)
            self.fill(words)
            self._words = words
        return self._words

    def _consume(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        if matcher.is_stopped():  # after this token, the only valid token is a stop token
            return super()._consume(matcher, token)
        return self._grammars.consume(matcher, token)
