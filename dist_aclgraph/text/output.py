"""OutputText: deltas of token ids in, pieces of text out, until a stop string or the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        logprobs: one for each token whose own text is certain since the last piece, or none at all.
        token_texts: these tokens' own texts; over all pieces they join to the text before stop
            strings cut it.
        finish_reason: "stop" or "length" in the last piece.
        has_end_token: whether the last of the tokens is an end token, which has no text.
    """

    text: str
    token_ids: list[int]
    logprobs: tuple[RowLogprobs, ...]
    token_texts: tuple[str, ...]
    finish_reason: str | None
    has_end_token: bool = False


class OutputText:
    """The text of one request as it grows.

    Args:
        prompt_ids: the prompt, on whose end the beginning of the text depends.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        includes_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop, includes_stop=includes_stop)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._rows: list[RowLogprobs] = []  # of tokens whose own text is not certain

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._matcher.matched

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
        num_taken = len(token_ids)
        for count, token_id in enumerate(token_ids[:num_spoken], start=1):
            text += self._feed(self._detokenizer.feed(token_id), 1)
            if self._matcher.matched is not None:
                finish_reason, has_end_token, num_taken = "stop", False, count
                break
        if finish_reason is not None:
            left = self._detokenizer.finish()
            if self._matcher.matched is None:
                text += self._feed(left, 0) + self._matcher.finish()
        taken = list(token_ids[:num_taken])
        if not logprobs and not self._rows:
            return TextPiece(text, taken, (), (), finish_reason, has_end_token)
        texts = self._detokenizer.take_token_texts()
        self._rows += [row for row in logprobs[:num_taken] if row is not None]
        num_rows = len(texts) + has_end_token
        rows, self._rows = self._rows[:num_rows], self._rows[num_rows:]
        return TextPiece(text, taken, tuple(rows), tuple(texts), finish_reason, has_end_token)

    def _feed(self, text: str, num_tokens: int) -> str:
        """Return the text that is certain; the first ``min_tokens`` tokens end no stop string."""
        self._num_tokens += num_tokens
        return self._matcher.feed(text, may_match=self._num_tokens > self._min_tokens)


def with_token_ids(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Return parameters that name tokens of this vocabulary: bad words have their token ids.

    A bad word is forbidden at the beginning of a word, and within one.

    Raises:
        InvalidParameterError: a token lies outside the vocabulary.
    """
    tokenizer.check_ids([token_id for token_id, _ in params.logit_bias], "logit_bias")
    tokenizer.check_ids(params.allowed_token_ids, "allowed_token_ids")
    if not params.bad_words:
        return params
    texts = [text for word in params.bad_words for text in (word.lstrip(), " " + word.lstrip())]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return replace(params, bad_word_ids=tuple({tuple(ids): None for ids in encoded if ids}))


def end_ids(tokenizer: Tokenizer, params: SamplingParams) -> tuple[int, ...]:
    """Return every id that ends a request's output: the model's own and the requested ones.

    Raises:
        InvalidParameterError: a requested one lies outside the vocabulary.
    """
    tokenizer.check_ids(params.stop_token_ids, "stop_token_ids")
    own = () if params.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))
