"""OutputText: converts new token ids to new pieces of text, until a stop string or the end of the
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from dist_aclgraph.formats.events import CallBegin, CallEnd, Content, Event
from dist_aclgraph.formats.scanner import Reader
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.detokenizer import Detokenizer
from dist_aclgraph.text.stops import StopMatcher
from dist_aclgraph.text.tokenizer import Tokenizer


class TextPiece(msgspec.Struct, frozen=True):
    """The text and the tokens that one delta adds to one output.

    Attributes:
        text: new text; no later token changes it.
        token_ids: the output's new tokens, including a stop token. Tokens after a stop string are
            omitted.
        logprobs: one report for each token whose text became certain since the last piece; empty if
            log-probabilities were not requested.
        token_texts: the text of each token that ``logprobs`` reports. The joined token texts of all
            pieces are the whole text, including the part that a stop string cuts off.
        finish_reason: "stop" or "length" in the last piece.
        has_end_token: whether the last of the tokens is a stop token, which has no text.
        events: if the output has a reader, the events into which it divides the text; ``text`` is
            empty in this case.
    """

    text: str
    token_ids: list[int]
    logprobs: tuple[RowLogprobs, ...]
    token_texts: tuple[str, ...]
    finish_reason: str | None
    has_end_token: bool = False
    events: tuple[Event, ...] = ()


class OutputText:
    """The text of one request as it grows.

    Attributes:
        stop_reason: the requested stop string or stop token that ended the text; None if the text
            has not ended, or ended for another reason.

    Args:
        prompt_ids: the prompt; the beginning of the text depends on the prompt's last tokens.
        reader: the object that divides the text into reasoning, content and calls. With a reader,
            stop strings end the output only within content.
        max_calls: the output ends after this number of calls; None if there is no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        reader: Reader | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens
        )
        form = params.structured_outputs
        stops = params.stop if form is None or form.has_free_text else ()
        includes_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(stops, includes_stop=includes_stop)
        self._stop_ids = params.stop_token_ids
        self.stop_reason: int | str | None = None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._rows: list[RowLogprobs] = []  # reports of tokens whose text is not certain yet
        self._reader = reader
        self._max_calls = max_calls
        # tokens that are passed to the reader when their text is certain
        self._unread: deque[int] = deque()
        self._events: list[Event] = []
        self._has_all_calls = False

    @property
    def num_thought_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.num_thought_tokens

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[RowLogprobs | None],
        finish_reason: str | None,
    ) -> TextPiece:
        """Add new tokens, and return the piece of text that they add to the output.

        Tokens are added one by one. So token counts and reported log-probabilities do not depend on
        the size of a delta.

        Args:
            logprobs: one report for each token; empty if log-probabilities were not requested.
            finish_reason: the reason why the engine ended the request with these tokens; "stop"
                means that the last token is a stop token.
        """
        has_end_token = finish_reason == "stop"
        num_spoken = len(token_ids) - has_end_token
        text = ""
        texts: list[str] = []
        num_taken = len(token_ids)
        for count, token_id in enumerate(token_ids[:num_spoken], start=1):
            new = self._detokenizer.feed(token_id)
            if self._reader is None:
                text += self._feed(new, 1)
            else:
                self._num_tokens += 1
                self._unread.append(token_id)
                texts += self._read_certain()
            if self._is_ended:
                finish_reason, has_end_token, num_taken = "stop", False, count
                break
        if finish_reason is not None:
            left = self._detokenizer.finish()
            if self._reader is not None:
                texts += self._read_certain()
                self._take(self._reader.finish())
                self._take_content(self._matcher.finish())
            elif self._matcher.matched is None:
                text += self._feed(left, 0) + self._matcher.finish()
            if self._is_ended:  # the text that has become certain may contain a stop string
                finish_reason = "stop"
            is_asked = has_end_token and token_ids[-1] in self._stop_ids
            self.stop_reason = token_ids[-1] if is_asked else self._matcher.matched
        taken = list(token_ids[:num_taken])
        texts += self._detokenizer.take_token_texts()
        events, self._events = tuple(self._events), []
        if not logprobs and not self._rows:
            return TextPiece(text, taken, (), (), finish_reason, has_end_token, events)
        self._rows += [row for row in logprobs[:num_taken] if row is not None]
        num_rows = len(texts) + has_end_token
        rows, self._rows = self._rows[:num_rows], self._rows[num_rows:]
        return TextPiece(
            text, taken, tuple(rows), tuple(texts), finish_reason, has_end_token, events
        )

    @property
    def _is_ended(self) -> bool:
        return self._matcher.matched is not None or self._has_all_calls

    def _read_certain(self) -> list[str]:
        """Pass to the reader all tokens whose texts are certain; return these texts."""
        assert self._reader is not None
        texts = self._detokenizer.take_token_texts()
        for text in texts:
            self._take(self._reader.feed(self._unread.popleft(), text))
        return texts

    def _take(self, events: Iterable[Event]) -> None:
        """Store events up to the end of the output. A stop string cannot match partly before and
        partly after a call.
        """
        for event in events:
            if self._is_ended:
                return
            if isinstance(event, Content):
                may_match = self._num_tokens > self._min_tokens
                self._take_content(self._matcher.feed(event.text, may_match=may_match))
                continue
            if isinstance(event, CallBegin):
                self._take_content(self._matcher.finish())
                # A new call ends the previous call, which may have no ``CallEnd``.
                self._has_all_calls = self._is_last(event.index - 1)
                if self._has_all_calls:
                    return
            self._events.append(event)
            if isinstance(event, CallEnd):
                self._has_all_calls = self._is_last(event.index)

    def _is_last(self, call: int) -> bool:
        return self._max_calls is not None and call + 1 >= self._max_calls

    def _take_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _feed(self, text: str, num_tokens: int) -> str:
        """Return the text that no later token changes. Stop strings are ignored in the text of the
        first ``min_tokens`` tokens.
        """
        self._num_tokens += num_tokens
        return self._matcher.feed(text, may_match=self._num_tokens > self._min_tokens)


def with_token_ids(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Check that all tokens of the parameters are in the vocabulary; return the parameters with the
    token ids of bad words.

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

    If the request demands an output format, only a stop token of the model ends the output.

    Raises:
        InvalidParameterError: a requested id lies outside the vocabulary.
    """
    tokenizer.check_ids(params.stop_token_ids, "stop_token_ids")
    if params.structured_outputs is not None:
        return tokenizer.eos_ids
    own = () if params.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))
