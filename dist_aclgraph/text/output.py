"""OutputText: turns new token ids into new pieces of text, until a stop string or the end."""

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
    """The text and the tokens that one delta adds to one output.

    Attributes:
        text: new text; no later token changes it.
        token_ids: the output's new tokens, end token included; no tokens after a stop string.
        logprobs: one for each token whose text became certain since the last piece; empty if
            log-probabilities were not requested.
        token_texts: the texts of these tokens. The token texts of all pieces join to the text
            before a stop string cuts it.
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
        prompt_ids: the prompt; the beginning of the text depends on the prompt's last tokens.
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
        self._rows: list[RowLogprobs] = []  # of tokens whose text is not certain yet

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text; None before."""
        return self._matcher.matched

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[RowLogprobs | None],
        finish_reason: str | None,
    ) -> TextPiece:
        """Add new tokens, and return the piece of text that they make.

        Tokens are added one by one, so that the number of tokens in a delta changes neither the
        counts nor the reported values.

        Args:
            logprobs: one for each token; empty if they were not requested.
            finish_reason: why the engine ended the request with these tokens; "stop" means that the
                last token is an end token.
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
        texts = self._detokenizer.take_token_texts()
        if not logprobs and not self._rows:
            return TextPiece(text, taken, (), (), finish_reason, has_end_token)
        self._rows += [row for row in logprobs[:num_taken] if row is not None]
        num_rows = len(texts) + has_end_token
        rows, self._rows = self._rows[:num_rows], self._rows[num_rows:]
        return TextPiece(text, taken, tuple(rows), tuple(texts), finish_reason, has_end_token)

    def _feed(self, text: str, num_tokens: int) -> str:
        """Return the text that is certain. No stop string matches within the first ``min_tokens``
        tokens.
        """
        self._num_tokens += num_tokens
        return self._matcher.feed(text, may_match=self._num_tokens > self._min_tokens)


def with_token_ids(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Return parameters whose tokens are in this vocabulary; bad words have got their token ids.

    A bad word is forbidden at the beginning of a word, and inside a word.

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
    """Return every token id that ends a request's output: the model's ids and the requested ids.

    Raises:
        InvalidParameterError: a requested id lies outside the vocabulary.
    """
    tokenizer.check_ids(params.stop_token_ids, "stop_token_ids")
    own = () if params.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))
