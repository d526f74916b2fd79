"""After any sequence of steps and discarded tokens, masks equal those of a new matcher that has
read the whole output.
"""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.masks import grammar_row
from dist_aclgraph.engine.masks.grammars import Grammars
from dist_aclgraph.engine.masks.matchers import Matchers
from dist_aclgraph.sampling import Structure
from dist_aclgraph.steps.step import RowSampling
from dist_aclgraph.text.grammars import PARSER_LIMITS, make_limits, open_tokenizer, vocabulary_of
from tests.engine.sampling.test_structured import DEMO, END, GRAMMARS, TOKENIZER, thought

ENDS = TOKENIZER.eos_ids
VOCABULARY = vocabulary_of(TOKENIZER)
LL = open_tokenizer(VOCABULARY)
PROMPT = 5
BEGIN, STOP = 300, 301  # ids of the tokens that begin and end the reasoning


class Row:
    """One row. Its output grows by steps, and shrinks when tokens are discarded."""

    def __init__(
        self, structure: Structure, k: int, min_tokens: int = 0, *, may_wait: bool = True
    ) -> None:
        self.output: list[int] = []
        self.failed: dict[int, str] = {}
        self.num_known = 0  # number of output tokens that the host has
        self._k = k
        self._batch = SimpleNamespace(
            num_tokens=np.array([PROMPT]), token_ids=np.zeros((1, 200), np.int32)
        )
        batch: Any = self._batch
        self.matchers = Matchers(
            batch, lambda: VOCABULARY, TOKENIZER.vocab_size, k + 1, rows_may_wait=may_wait
        )
        self._sampling = RowSampling(
            num_prompt_tokens=PROMPT, structure=structure, min_tokens=min_tokens
        )
        self.begin()

    def begin(self) -> None:
        self.matchers.begin(0, self._sampling)
        while self.matchers.take_report().compiling:
            time.sleep(0.001)

    def serve(self, text: str) -> None:
        """Give the row to another request, which already has the output ``text``."""
        self.output = LL.tokenize_str(text)
        self.num_known = len(self.output)
        self._show()
        self.begin()

    def _show(self) -> None:
        self._batch.token_ids[0, PROMPT : PROMPT + len(self.output)] = self.output
        self._batch.num_tokens[0] = PROMPT + self.num_known

    def masks(self, drafts: list[int] | None = None) -> np.ndarray:
        """Return the mask of allowed tokens at each place, bool [k + 1, vocab]."""
        drafts = drafts or []
        self._show()
        num_logits = len(drafts) + 1
        first = PROMPT + len(self.output)
        step: Any = SimpleNamespace(
            kv_lens=np.array([first + num_logits - 1]),
            sampled=np.array([0]),
            num_logits=np.array([num_logits]),
            sampled_rows=np.array([0]),
        )
        if self.num_known < len(self.output):
            new = np.array(self.output[self.num_known :])
            before: Any = SimpleNamespace(
                kv_lens=np.array([first - 1]),
                sampled=np.array([0]),
                num_logits=np.array([len(new)]),
                sampled_rows=np.array([0]),
            )
            self.matchers.note(before, np.array([len(new)]), new)
        known: Any = SimpleNamespace(samples=np.zeros(self._k + 1, np.intp))
        table = np.array([[*drafts, *[0] * (self._k - len(drafts))]]) if self._k else None
        masks = self.matchers.masks(step, known, table)
        # If the row's masks were not computed in time, the row begins again with all its tokens.
        while (report := self.matchers.take_report()).unmasked:
            self._batch.num_tokens[0] = first
            self.begin()
            masks = self.matchers.masks(step, known, table)
        self.failed = report.failed
        assert masks is not None
        assert masks.places.tolist() == list(range(self._k + 1))
        bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : TOKENIZER.vocab_size].astype(bool)


def fresh_mask(grammar: str, output: list[int]) -> np.ndarray:
    matcher = llguidance.LLMatcher(LL, grammar, log_level=0, limits=make_limits())
    assert matcher.try_consume_tokens(output) == len(output)
    words = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
    return np.unpackbits(words.view(np.uint8)[0], bitorder="little")[: TOKENIZER.vocab_size] > 0


@given(st.data(), st.sampled_from(sorted(GRAMMARS)), st.integers(0, 3), st.booleans())
def test_masks_are_those_of_a_matcher_that_read_the_output(data, name, k, is_slow):
    grammar = GRAMMARS[name]
    row = Row(Structure(grammar=grammar, end_ids=ENDS, is_slow=is_slow), k)
    for _ in range(data.draw(st.integers(1, 12))):
        if set(ENDS) & set(row.output):
            break
        drafts: list[int] = []
        while len(drafts) < k and not set(ENDS) & set(drafts) and data.draw(st.booleans()):
            allowed = np.flatnonzero(fresh_mask(grammar, row.output + drafts)).tolist()
            drafts.append(data.draw(st.sampled_from(allowed)))
        found = row.masks(drafts)
        for place in range(1 if is_slow else len(drafts) + 1):
            if set(ENDS) & set(drafts[:place]):
                continue
            assert (found[place] == fresh_mask(grammar, row.output + drafts[:place])).all()
        action = data.draw(st.sampled_from(["accept", "sample", "void", "rewind"]))
        if action == "rewind":  # the last steps were undone
            row.output = row.output[: data.draw(st.integers(row.num_known, len(row.output)))]
        elif action != "void":
            accepted = (
                drafts[: data.draw(st.integers(0, len(drafts)))] if action == "accept" else []
            )
            row.num_known = len(row.output)
            row.output = row.output + accepted
            if not set(ENDS) & set(accepted):
                allowed = np.flatnonzero(fresh_mask(grammar, row.output)).tolist()
                row.output = [*row.output, data.draw(st.sampled_from(allowed))]


def test_a_row_with_a_slow_grammar_serves_another_request():
    row = Row(Structure(grammar=GRAMMARS["regex"], end_ids=ENDS, is_slow=True), 0)
    for text in ("abab", "ba", "abb, 1", ""):
        row.serve(text)
        assert (row.masks()[0] == fresh_mask(GRAMMARS["regex"], row.output)).all()


@pytest.mark.parametrize("is_slow", [False, True])
def test_requests_with_a_common_grammar_do_not_use_up_each_others_states(monkeypatch, is_slow):
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 400)
    grammar = llguidance.LLMatcher.grammar_from_regex("|".join(f"{x}{{0,150}}" for x in "abcdef"))
    row = Row(Structure(grammar=grammar, end_ids=ENDS, is_slow=is_slow), 0)
    for letter in "abcdefa":
        row.serve(letter * 120)
        assert (row.masks()[0] == fresh_mask(grammar, row.output)).all()
        assert not row.failed


def test_a_request_that_begins_its_row_again_does_not_compile_its_grammar_again(monkeypatch):
    grammar = GRAMMARS["regex"]
    row = Row(Structure(grammar=grammar, end_ids=ENDS), 0, may_wait=False)
    row.matchers._grammars.stop_sharing(Structure(grammar=grammar, end_ids=ENDS))
    compiled = []
    compile_one = Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda self, text: compiled.append(text) or compile_one(self, text)
    )
    for text in ("ab", "ab", "abb"):  # the request continues
        row.serve(text)
        assert (row.masks()[0] == fresh_mask(grammar, row.output)).all()
    assert len(compiled) == 1

    row.serve("b")  # another request; its grammar is compiled again
    assert (row.masks()[0] == fresh_mask(grammar, row.output)).all()
    assert len(compiled) == 2


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_request_ends_if_it_needs_too_many_states_itself(monkeypatch, is_slow):
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 100)
    bomb = llguidance.LLMatcher.grammar_from_regex("([ab]*a[ab]{14}c)*")
    letters = np.random.default_rng(1).choice(["a", "b"], 180)
    row = Row(Structure(grammar=bomb, end_ids=ENDS, is_slow=is_slow), 0)
    for _ in range(2):
        row.serve("".join(letters))
        row.masks()
        assert "too many states" in row.failed[0]


def test_reasoning_is_free_but_has_no_end_token():
    row = Row(thought(grammar=GRAMMARS["choice"], is_thinking=True, end_ids=ENDS), 0)

    assert np.flatnonzero(~row.masks()[0]).tolist() == sorted(ENDS)
    row.output = [17, 44, STOP]
    assert (row.masks()[0] == fresh_mask(GRAMMARS["choice"], [])).all()


def test_the_model_may_open_the_reasoning_with_its_first_token_only():
    row = Row(thought(grammar=GRAMMARS["choice"], end_ids=ENDS), 0)
    first = row.masks()[0]

    assert first[BEGIN]
    first[BEGIN] = False
    assert (first == fresh_mask(GRAMMARS["choice"], [])).all()
    row.output = [BEGIN]
    assert np.flatnonzero(~row.masks()[0]).tolist() == sorted(ENDS)
    row = Row(thought(grammar=GRAMMARS["choice"], end_ids=ENDS), 0)
    row.output = TOKENIZER.encode("n", add_special_tokens=False)
    assert (row.masks()[0] == fresh_mask(GRAMMARS["choice"], row.output)).all()


def test_a_first_token_that_is_undone_leaves_the_choice_to_reason_open():
    row = Row(thought(grammar=GRAMMARS["choice"], end_ids=ENDS), 0)
    first = row.masks()[0]

    row.output = TOKENIZER.encode("n", add_special_tokens=False)
    row.masks()
    row.output = []

    assert (row.masks()[0] == first).all()


@pytest.mark.parametrize(("is_thinking", "begun"), [(True, []), (False, [BEGIN])])
@pytest.mark.parametrize("grammar", ["", GRAMMARS["regex"]])
def test_the_reasoning_is_ended_after_its_budget(is_thinking, begun, grammar):
    structure = thought(grammar=grammar, is_thinking=is_thinking, max_thought=2, end_ids=ENDS)
    row = Row(structure, 0)

    for length in range(3):
        row.output = [*begun, *[17] * length]
        allowed = np.flatnonzero(row.masks()[0]).tolist()
        assert (allowed == [STOP]) == (length == 2)
    row.output = [*begun, 17, 17, STOP]
    assert row.masks()[0].all() == (not grammar)


def test_the_end_waits_for_min_tokens_where_something_else_is_allowed():
    row = Row(Structure(grammar=GRAMMARS["regex"], end_ids=ENDS), 0, min_tokens=50)
    row.output = LL.tokenize_str("aba")

    found = row.masks()[0]
    assert fresh_mask(GRAMMARS["regex"], row.output)[END]
    assert found.any()
    assert not found[list(ENDS)].any()


def test_the_end_comes_before_min_tokens_where_nothing_else_is_allowed():
    row = Row(Structure(grammar=GRAMMARS["choice"], end_ids=ENDS), 0, min_tokens=50)
    row.output = LL.tokenize_str("yes")

    assert (
        np.flatnonzero(row.masks()[0]).tolist()
        == np.flatnonzero(fresh_mask(GRAMMARS["choice"], row.output)).tolist()
    )
    assert row.masks()[0][END]


def test_the_demo_has_the_tokens_that_this_file_uses():
    assert DEMO.name == "tiny-deepseek"
    assert TOKENIZER.vocab_size > STOP


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize(("first_s", "each_s", "most"), [(1.5, 0.0, 1), (0.0, 0.1, 14)])
def test_masks_that_take_too_long_end_the_request(may_wait, first_s, each_s, most, monkeypatch):
    times = itertools.accumulate(itertools.chain([first_s], itertools.repeat(each_s)), initial=0.0)
    steps = ((begin, end) for begin, end in itertools.pairwise(times))
    clock = itertools.chain.from_iterable(steps)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    grammar = llguidance.LLMatcher.grammar_from_regex("a*")
    structure = Structure(grammar=grammar, end_ids=ENDS, is_slow=True)
    row = Row(structure, 0, may_wait=may_wait)
    count = 0
    while not row.failed:
        count += 1
        row.masks()
        row.num_known = len(row.output)
        row.output = [*row.output, LL.tokenize_str("a")[0]]

    assert most / 3 < count <= most
    assert "too ambiguous" in row.failed[0]


class Clock:
    """Stands for a clock of CPU time. It advances only while a mask is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mask_s: float) -> None:
        self.num_masks = 0
        fill = grammar_row.GrammarRow.fill

        def count(row: grammar_row.GrammarRow, words: np.ndarray) -> None:
            self.num_masks += 1
            fill(row, words)

        monkeypatch.setattr(grammar_row.GrammarRow, "fill", count)
        monkeypatch.setattr(time, "thread_time", lambda: mask_s * self.num_masks)


def test_masks_of_drafts_count_in_every_row(monkeypatch):
    grammar = llguidance.LLMatcher.grammar_from_regex("a*")
    row = Row(Structure(grammar=grammar, end_ids=ENDS), 3)
    Clock(monkeypatch, 0.3)

    row.masks([LL.tokenize_str("a")[0]] * 3)

    assert "the masks of 0 tokens took 1.2 s" in row.failed[0]


def test_a_slow_row_computes_each_mask_once(monkeypatch):
    grammar = llguidance.LLMatcher.grammar_from_regex("a*")
    row = Row(Structure(grammar=grammar, end_ids=ENDS, is_slow=True), 0)
    clock = Clock(monkeypatch, 0.0)
    for _ in range(5):
        row.masks()
        row.num_known = len(row.output)
        row.output = [*row.output, LL.tokenize_str("a")[0]]

    assert clock.num_masks == 5
