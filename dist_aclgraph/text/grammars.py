"""Vocabularies for llguidance, which computes the tokens that a grammar allows next."""

from __future__ import annotations

from typing import Any, NamedTuple

import llguidance

from dist_aclgraph.config import Config
from dist_aclgraph.text.tokenizer import Tokenizer

# The limits count work instead of time, so that all ranks reach a limit at the same token.
PARSER_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 10_000,
    # A row of the Earley parser has n items for a choice of n texts, and about 4n items for an
    # object with n keys.
    "max_items_in_row": 1 << 13,
    "verbose_errors": False,  # so that errors do not contain the grammar
}


class Vocabulary(NamedTuple):
    """The properties of a tokenizer that grammars need.

    Attributes:
        tokenizer: the tokenizer as the text of a tokenizer.json.
        size: number of the model's tokens.
        end_ids: tokens that end an output; not empty.
    """

    tokenizer: str
    size: int
    end_ids: tuple[int, ...]


def read_vocabulary(config: Config) -> Vocabulary:
    """Return the vocabulary of the configured model.

    The file of ``chat_template`` is not read, because an engine's node may not have this file.
    """
    return vocabulary_of(Tokenizer(config.model, config.model_overrides))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.as_json(), tokenizer.vocab_size, tokenizer.eos_ids)


def make_limits() -> llguidance.LLParserLimits:
    """Return the limits of every matcher."""
    return llguidance.LLParserLimits(**PARSER_LIMITS)


def open_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Prepare a vocabulary; this takes about 1 s and 130 MB for 150,000 tokens."""
    return llguidance.LLTokenizer(
        vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.end_ids)
    )
