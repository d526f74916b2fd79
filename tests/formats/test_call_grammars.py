"""The grammar of each format allows only calls that its reader can read, with arguments that match
the schema.
"""

from __future__ import annotations

import json
import random

import jsonschema
import llguidance
import llguidance.numpy
import numpy as np
import pytest
import tokenizers

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.formats.choice import FORMATS, AnswerFormat
from dist_aclgraph.formats.events import Event
from dist_aclgraph.sampling import StructuredOutputs
from dist_aclgraph.text.grammar_process import make_grammar
from dist_aclgraph.text.grammars import make_limits
from tests.formats.answers import Message, folded

TOOLS = {
    "find": {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "text": {"type": "string", "maxLength": 5},
            "deep": {"type": "boolean"},
            "kind": {"enum": ["a", "b c"]},
        },
        "required": ["n", "text"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
EACH = pytest.mark.parametrize("name", FORMATS)


class Walk:
    """Makes random answers that a grammar allows, with a vocabulary of single bytes and markers."""

    def __init__(self, name: str) -> None:
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        bpe = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
        self._tokenizer = tokenizers.Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        markers = [*FORMATS[name].MARKERS, "<end>"]
        self._tokenizer.add_special_tokens(markers)
        ids = {text: self._tokenizer.token_to_id(text) for text in markers}
        self.end = ids.pop("<end>")
        self.form = AnswerFormat(name, None, ids)
        self._less = self._tokenizer.token_to_id("<")
        self._ll = llguidance.LLTokenizer(self._tokenizer.to_str(), eos_token=[self.end])

    def matcher(self, form: StructuredOutputs) -> llguidance.LLMatcher:
        source = {"kind": form.kind, "text": form.text, "json_options": form.json_options}
        matcher = llguidance.LLMatcher(
            self._ll, make_grammar(source), log_level=0, limits=make_limits()
        )
        assert not matcher.is_error(), (form.text, matcher.get_error())
        return matcher

    def answer(self, form: StructuredOutputs, seed: int, most: int = 600) -> list[int] | None:
        """Return the tokens of a random answer; None if it does not end within ``most``."""
        rng, matcher, tokens = random.Random(seed), self.matcher(form), []
        words = llguidance.numpy.allocate_token_bitmask(1, self._ll.vocab_size)
        while len(tokens) < most:
            llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
            bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")
            allowed = np.flatnonzero(bits[: self._ll.vocab_size]).tolist()
            assert allowed
            # Ends and markers are chosen often, so that most answers end.
            rare = [token for token in allowed if token >= 256 or token == self._less]
            token = rng.choice(rare if rare and rng.random() < 0.4 else allowed)
            if token == self.end:
                return tokens
            assert matcher.consume_token(token)
            tokens.append(token)
        return None

    def tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def read(self, tokens: list[int]) -> Message:
        reader = self.form.reader(TOOLS, is_thinking=False)
        assert reader is not None
        events: list[Event] = []
        held: list[int] = []
        for token in tokens:  # bytes are read when they form whole characters
            held.append(token)
            text = self._tokenizer.decode(held, skip_special_tokens=False)
            if not text.endswith("\ufffd"):
                events += reader.feed(token, text)
                held = []
        return folded(events + reader.finish())


def check(message: Message, strict: set[str]) -> None:
    for name, arguments, is_whole in message.calls:
        assert is_whole
        found = json.loads(arguments)
        jsonschema.validate(found, TOOLS[name] if name in strict else {"type": "object"})


@EACH
def test_required_calls_are_calls_of_the_tools(name):
    walk = Walk(name)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True)
    assert form is not None
    found = 0
    for seed in range(40):
        tokens = walk.answer(form, seed)
        if tokens is None:
            continue
        if name == "gpt_oss":  # this token ends the answer
            tokens.append(walk.form.token_ids["<|call|>"])
        message = walk.read(tokens)
        found += 1
        assert message.calls
        assert not message.content
        check(message, set(TOOLS))
    assert found > 5


@EACH
def test_one_call_if_calls_are_not_parallel(name):
    walk = Walk(name)
    form = walk.form.structured(None, TOOLS, set(TOOLS), is_required=True, is_parallel=False)
    assert form is not None
    answers = [walk.read(tokens) for seed in range(12) if (tokens := walk.answer(form, seed))]

    assert all(len(message.calls) == 1 for message in answers)


@EACH
def test_strict_tools_are_checked_within_text(name):
    walk = Walk(name)
    form = walk.form.structured(None, TOOLS, {"find"})
    if name in ("gpt_oss", "llama3_json", "pythonic"):
        assert form is None or name != "gpt_oss"
        return
    assert form is not None
    found = 0
    for seed in range(60):
        if (tokens := walk.answer(form, seed)) is not None:
            message = walk.read(tokens)
            found += len(message.calls)
            check(message, {"find"})
    assert found


@EACH
def test_content_of_a_form_or_calls(name):
    walk = Walk(name)
    form = walk.form.structured(StructuredOutputs(choice=["yes", "no"]), TOOLS, {"find"})
    assert form is not None
    seen = set()
    for seed in range(60):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss" and walk.form.token_ids["<|constrain|>"] in tokens:
                tokens.append(walk.form.token_ids["<|call|>"])
            message = walk.read(tokens)
            check(message, {"find"})
            assert message.calls or message.content in ("yes", "no")
            seen.add(bool(message.calls))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\\/b", "a\\/b"), (r"a\/b", "a/b"), ("a\nb", "a\nb"), ("", "")],
)
def test_a_pattern_says_the_same_beside_calls(pattern, text):
    walk = Walk("hermes")
    form = walk.form.structured(StructuredOutputs(regex=pattern), TOOLS)
    assert form is not None
    matcher = walk.matcher(form)

    assert matcher.consume_tokens([*walk.tokens(text), walk.end])


def test_a_pattern_cannot_leave_its_place():
    walk = Walk("hermes")

    with pytest.raises(InvalidParameterError, match="backslash"):
        walk.form.structured(StructuredOutputs(regex="a\\"), TOOLS)


REFERENCES = {
    "type": "object",
    "definitions": {
        "word": {"type": "string", "pattern": "^[xy]{2}$"},
        "pair": {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}], "minItems": 1, "items": {
            "$ref": "#/definitions/same"}, "maxItems": 2},
        "same": {"$ref": "#/properties/flag"},
    },
    "$defs": {"n": {"type": "integer", "minimum": 3, "maximum": 5}},
    "properties": {
        "flag": {"type": "boolean"},
        "word": {"$ref": "#/definitions/word"},
        "pair": {"$ref": "#/definitions/pair"},
    },
    "required": ["flag", "word", "pair"],
    "additionalProperties": False,
}  # fmt: skip


@EACH
def test_arguments_match_schemas_with_references(name):
    walk = Walk(name)
    tools = {"find": REFERENCES}
    form = walk.form.structured(None, tools, {"find"}, is_required=True, is_parallel=False)
    assert form is not None
    found = 0
    for seed in range(10):
        if (tokens := walk.answer(form, seed)) is not None:
            if name == "gpt_oss":
                tokens.append(walk.form.token_ids["<|call|>"])
            ((_, arguments, is_whole),) = walk.read(tokens).calls
            assert is_whole
            jsonschema.validate(json.loads(arguments), REFERENCES)
            found += 1
    assert found
