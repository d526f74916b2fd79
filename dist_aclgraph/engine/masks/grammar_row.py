"""The state of one row that has a grammar, or a maximum number of reasoning tokens."""

from __future__ import annotations

from concurrent.futures import Future

import llguidance

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.engine.masks.permitted import ALL, Permitted, set_bit
from dist_aclgraph.sampling import Structure
from dist_aclgraph.steps.step import RowSampling
from dist_aclgraph.text.grammar_errors import TOO_AMBIGUOUS, reason_of

NO_MATCH = "the output does not match the grammar"
# Limits of the CPU time that a request's masks may take, in seconds. The request ends with an error
# if one mask takes more than MAX_MASK_S, or if all of its masks together take more than MAX_MASK_S
# + TOKEN_S * number of tokens.
MAX_MASK_S, TOKEN_S = 1.0, 0.02


class NotReadyError(Exception):
    """The next mask is not computed yet, or the row's grammar is not compiled yet."""


class GrammarRow:
    """The state of one row that has a grammar, or a maximum number of reasoning tokens.

    Attributes:
        is_shared: whether the row's matcher shares its lexer with matchers of other requests.
        num_seen: number of output tokens that were added to the state.
        complaint: the error with which the request must end, if its masks have taken too much CPU
            time; otherwise "".
    """

    def __init__(
        self,
        sampling: RowSampling,
        matcher: Future[llguidance.LLMatcher] | None,
        end_words: IntArray,
        permitted: Permitted | None,
        *,
        is_shared: bool = False,
    ) -> None:
        assert sampling.structure is not None
        self.structure: Structure = sampling.structure
        self.begin = sampling.num_prompt_tokens
        self.free_from = sampling.min_tokens
        self._coming = matcher
        self._matcher: llguidance.LLMatcher | None = None
        self.permitted = permitted
        self.is_shared = is_shared
        self._end_words = end_words  # mask that allows only the tokens that end an output
        self._ends = frozenset(self.structure.end_ids)
        self.num_seen = 0
        self._seen: list[int] = []  # the first ``num_seen`` output tokens; empty if ``is_shared``
        self._num_consumed = 0
        self._is_over = False  # whether the last consumed token has ended the output
        self._opens = False  # whether the output's first token begins reasoning
        self._answer: int | None = None  # number of output tokens before the answer
        self.complaint = ""
        self._spent_s = 0.0
        self._num_charged = 0  # number of tokens that ``_spent_s`` covers
        self._rewind_phase()

    @property
    def error(self) -> str:
        """The reason why the matcher has failed; empty if it has not failed."""
        matcher = self._ready() if self._is_compiled else None
        return reason_of(matcher.get_error()) if matcher is not None and matcher.is_error() else ""

    @property
    def is_compiling(self) -> bool:
        """Whether the row's grammar is not compiled yet, so that the row must wait."""
        return not self._is_compiled

    @property
    def _is_compiled(self) -> bool:
        return self._coming is None or self._coming.done()

    def _ready(self) -> llguidance.LLMatcher | None:
        """Return the row's own matcher; None if it has no grammar.

        Raises:
            NotReadyError: the grammar is not compiled yet.
        """
        if not self._is_compiled:
            raise NotReadyError
        if self._coming is not None:
            self._matcher, self._coming = self._coming.result().deep_copy(), None
        return self._matcher

    def _rewind_phase(self) -> None:
        structure = self.structure
        if structure.think_end < 0:
            self._answer = 0
        elif self._answer is not None and self.num_seen < self._answer:
            self._answer = None
        if self.num_seen == 0:  # no token has begun reasoning yet
            self._opens = False
            self._answer = None if structure.think_end >= 0 else 0

    @property
    def _is_thinking(self) -> bool:
        return self._answer is None and (self.structure.is_thinking or self._opens)

    def go_back(self, num_tokens: int) -> None:
        """Forget all tokens after the first ``num_tokens`` of the output."""
        if num_tokens >= self.num_seen:
            return
        answer, self.num_seen = self._answer, num_tokens
        del self._seen[num_tokens:]
        if self._matcher is not None and answer is not None:
            too_many = self._num_consumed - max(0, num_tokens - answer)
            if too_many > 0:
                self._matcher.rollback(too_many)
                self._num_consumed -= too_many
                self._is_over = False
        self._rewind_phase()

    def add(self, token: int) -> bool:
        """Add the next token of the output.

        Return false, and add nothing, if the token is forbidden.
        """
        structure = self.structure
        if self._answer is None:
            if self._is_thinking:
                if token == structure.think_end:
                    self._answer = self.num_seen + 1
                self._count(token)
                return True
            if token == structure.think_begin:
                self._opens = True
                self._count(token)
                return True
            self._answer = self.num_seen
        matcher = self._ready()
        if matcher is not None and not self._is_over:
            if not self._consume(matcher, token):
                return False
            self._num_consumed += 1
            self._is_over = token in self._ends
        self._count(token)
        return True

    def _count(self, token: int) -> None:
        self.num_seen += 1
        if not self.is_shared:
            self._seen.append(token)

    def leave_matcher(
        self, sampling: RowSampling, output: list[int]
    ) -> Future[llguidance.LLMatcher] | None:
        """Return the row's own matcher for the next request in the row. The matcher is reset to its
        initial state. Return None if the next request must not use the matcher.

        While a request waits for its grammar, the request may lose its row, and get this row again
        later. If the grammar were compiled again each time, the request might wait for ever. But a
        matcher keeps the lexer states of its request. So only this request may use the matcher
        again.

        Args:
            output: the output of the next request in the row.
        """
        is_same = self.structure == sampling.structure and self._seen == output[: self.num_seen]
        if self.is_shared or not is_same or self.error:
            return None
        if self._matcher is None:
            return self._coming
        self._matcher.reset()
        coming: Future[llguidance.LLMatcher] = Future()
        coming.set_result(self._matcher)
        return coming

    def _consume(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        return matcher.try_consume_tokens([token]) == 1

    def charge(self, took_s: float, num_tokens: int) -> None:
        """Add ``took_s`` to the CPU time of the row's masks; set ``complaint`` if the sum exceeds
        the limit.
        """
        self._spent_s += took_s
        self._num_charged += num_tokens
        # ``num_tokens`` can be large, because all tokens of a continued output are added in one
        # call.
        if (
            took_s > MAX_MASK_S + TOKEN_S * num_tokens
            or self._spent_s > MAX_MASK_S + TOKEN_S * self._num_charged
        ):
            took = f"the masks of {self._num_charged} tokens took {self._spent_s:.1f} s"
            self.complaint = f"{TOO_AMBIGUOUS} ({took} of CPU time)"

    def fill(self, words: IntArray) -> None:
        """Write the mask for the next token into the array ``words``, [num_words]."""
        structure = self.structure
        if self._is_thinking:
            begin = 0 if structure.is_thinking else 1
            words[:] = ALL
            if 0 <= structure.max_thought <= self.num_seen - begin:
                words[:] = 0
                allow(words, structure.think_end)
            elif structure.grammar:
                words &= ~self._end_words
            return
        matcher = self._ready()
        if matcher is None or self._is_over:
            words[:] = ALL
            return
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._answer is None:
            allow(words, structure.think_begin)
        if self.num_seen < self.free_from:
            without_ends = words & ~self._end_words
            if without_ends.any():
                words[:] = without_ends


def allow(words: IntArray, token: int) -> None:
    if token >= 0:
        set_bit(words, token)
