"""OutputText: deltas of token ids in, pieces of text out, until a stop string or the end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.detokenizer import Detokenizer
from dist_aclgraph.text.stops import StopMatcher
from dist_aclgraph.text.tokenizer import Tokenizer


class TextPiece(msgspec.Struct, frozen=True):
    """What one delta brought to one output.

    Attributes:
        text: new text that no later token changes.
        token_ids: the output's new tokens, an end token included; none after a stop string.
        logprobs: one for each of these tokens, or none at all.
        finish_reason: "stop" or "length" in the last piece.
        has_end_token: whether the last of the tokens is an end token, which has no text.
    """

    text: str
    token_ids: list[int]
    logprobs: tuple[RowLogprobs, ...]
    finish_reason: str | None
    has_end_token: bool = False


class OutputText:
    """The text of one request as it grows."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[RowLogprobs | None],
        finish_reason: str | None,
    ) -> TextPiece:
        """Return what new tokens bring.

        Tokens go in one by one: how many come at once must not show, neither in what is counted
        nor in what is reported.

        Args:
            logprobs: one for each token, or empty where they were not asked for.
            finish_reason: why the engine ended the request with these tokens; "stop" says that
                the last one is an end token.
        """
        has_end_token = finish_reason == "stop"
        num_spoken = len(token_ids) - has_end_token
        text = ""
        for count, token_id in enumerate(token_ids[:num_spoken], start=1):
            text += self._feed(self._detokenizer.feed_one(token_id), 1)
            if self._matcher.matched is not None:
                return self._piece(text, token_ids[:count], logprobs, "stop")
        if finish_reason is not None:
            text += self._feed(self._detokenizer.finish(), 0)
            text += self._matcher.finish()
        return self._piece(text, token_ids, logprobs, finish_reason, has_end_token)

    def _feed(self, text: str, num_tokens: int) -> str:
        """Return the text that is certain; the first ``min_tokens`` tokens end no stop string."""
        self._num_tokens += num_tokens
        return self._matcher.feed(text, may_match=self._num_tokens > self._min_tokens)

    @staticmethod
    def _piece(
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[RowLogprobs | None],
        finish_reason: str | None,
        has_end_token: bool = False,
    ) -> TextPiece:
        rows: tuple[RowLogprobs, ...] = ()
        if logprobs:
            rows = tuple(row for row in logprobs[: len(token_ids)] if row is not None)
        return TextPiece(text, list(token_ids), rows, finish_reason, has_end_token)


def end_ids(tokenizer: Tokenizer, params: SamplingParams) -> tuple[int, ...]:
    """Return every id that ends a request's output: the model's own and the requested ones.

    Raises:
        InvalidParameterError: a requested one lies outside the vocabulary.
    """
    tokenizer.check_ids(params.stop_token_ids, "stop_token_ids")
    own = () if params.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))
