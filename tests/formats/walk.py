"""Makes random answers that a grammar allows. The vocabulary consists of single bytes and of
markers.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
import tokenizers

from dist_aclgraph.formats.choice import FORMATS, AnswerFormat
from dist_aclgraph.formats.events import Event
from dist_aclgraph.sampling import StructuredOutputs
from dist_aclgraph.text.grammar_process import make_grammar
from dist_aclgraph.text.grammars import make_limits
from tests.formats.answers import Message, folded

NUM_BYTES = 256  # number of tokens for single bytes; ids of markers follow


class Walk:
    """Makes random answers that a grammar allows, and reads answers.

    Args:
        has_tokens: whether each marker of the format is a single token.
        tools: schemas of the tools that the reader knows.
    """

    def __init__(self, name: str, tools: Mapping[str, Any], *, has_tokens: bool = True) -> None:
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        bpe = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        markers = [*(FORMATS[name].MARKERS if has_tokens else ()), "<end>"]
        self._tokenizer.add_special_tokens(markers)
        ids = {text: self._tokenizer.token_to_id(text) for text in markers}
        self.end = ids.pop("<end>")
        self.form = AnswerFormat(name, None, ids)
        self._tools = tools
        self._less = self._tokenizer.token_to_id("<")
        self._ll = llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=[self.end])
        self._matchers: dict[StructuredOutputs, llguidance.LLMatcher] = {}

    def matcher(self, form: StructuredOutputs) -> llguidance.LLMatcher:
        if form not in self._matchers:
            source = {"kind": form.kind, "text": form.text, "json_options": form.json_options}
            made = llguidance.LLMatcher(
                self._ll, make_grammar(source), log_level=0, limits=make_limits()
            )
            assert not made.is_error(), (form.text, made.get_error())
            self._matchers[form] = made
        return self._matchers[form].deep_copy()

    def allows(self, form: StructuredOutputs, tokens: list[int]) -> bool:
        """Return whether the grammar allows an answer of exactly these tokens."""
        matcher = self.matcher(form)
        is_read = matcher.try_consume_tokens(tokens) == len(tokens)
        assert not matcher.is_error(), matcher.get_error()
        return is_read and matcher.is_accepting()

    def answer(
        self, form: StructuredOutputs, seed: int, most: int = 600, begun: str = ""
    ) -> list[int] | None:
        """Return the tokens of a random answer that begins with the text ``begun``. None if the
        answer does not end within ``most`` tokens.
        """
        rng, matcher, tokens = random.Random(seed), self.matcher(form), self.tokens(begun)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        while len(tokens) < most:
            words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(words, count=self._ll.vocab_size, bitorder="little")
            allowed = bits.nonzero()[0].tolist()
            assert allowed
            # The end token and markers are chosen more often than bytes, so that most answers end.
            rare = allowed[bisect_left(allowed, NUM_BYTES) :]
            if bits[self._less]:
                rare.insert(0, self._less)
            token = rng.choice(rare if rare and rng.random() < 0.4 else allowed)
            if token == self.end:
                return tokens
            assert matcher.consume_token(token)
            tokens.append(token)
        return None

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def spelled(self, text: str) -> list[int]:
        """Return the tokens of a text in which markers are spelled with bytes, not written as
        marker tokens.
        """
        return [token for sign in text for token in self.tokens(sign)]

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def read(self, tokens: list[int]) -> Message:
        reader = self.form.reader(self._tools, is_thinking=False)
        assert reader is not None
        events: list[Event] = []
        held: list[int] = []
        for token in tokens:  # the reader gets text as soon as bytes form whole characters
            held.append(token)
            text = self.text(held)
            if not text.endswith("\ufffd"):
                events += reader.feed(token, text)
                held = []
        return folded(events + reader.finish())
