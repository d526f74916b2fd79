"""Compiled grammars are kept. The memory and the number of kept grammars are limited. A waiting
request always gets its grammar.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dist_aclgraph.engine.masks.grammars import BYTES_OF_CHAR, MAX_KEPT, MAX_KEPT_BYTES, Grammars
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import Structure, StructuredOutputs
from dist_aclgraph.text.structure import BOUNDS, GrammarCompiler
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.engine.steps.test_steps_in_flight import DEMO


def make_grammars() -> Grammars:
    nothing: Any = None
    return Grammars(lambda: nothing)


def test_a_grammar_that_is_not_compiled_yet_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_compile = threading.Event()
    compiled: list[str] = []

    def compile_late(self: Grammars, grammar: str) -> Any:
        may_compile.wait()
        compiled.append(grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    grammars = make_grammars()
    texts = [str(i) * (MAX_KEPT_BYTES // BYTES_OF_CHAR // 4) for i in range(9)]

    waiting = [grammars.compile(Structure(grammar=text)) for text in texts]
    again = [grammars.compile(Structure(grammar=text)) for text in texts]
    may_compile.set()
    for future in waiting:
        future.result(60)

    assert again == waiting
    assert compiled == texts
    grammars.compile(Structure(grammar="x"))
    first = grammars.compile(Structure(grammar=texts[0]))
    assert first is not waiting[0], "old grammars are forgotten"


def test_short_grammars_that_take_much_memory_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: grammar)
    grammars = make_grammars()
    many = [Structure(grammar=f"{i}", num_bytes=MAX_KEPT_BYTES // 20) for i in range(50)]
    compiled = []
    for structure in many:
        compiled.append(grammars.compile(structure))
        compiled[-1].result(60)

    again = [grammars.compile(structure) for structure in many[:-21:-1]]

    assert again == compiled[:-21:-1]
    assert grammars.compile(many[29]) is not compiled[29]


def test_the_number_of_kept_grammars_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: grammar)
    grammars = make_grammars()
    many = [Structure(grammar=f"{i}") for i in range(2 * MAX_KEPT)]
    compiled = []
    for structure in many:
        compiled.append(grammars.compile(structure))
        compiled[-1].result(60)

    assert grammars.compile(many[MAX_KEPT]) is compiled[MAX_KEPT]
    assert grammars.compile(many[MAX_KEPT - 1]) is not compiled[MAX_KEPT - 1]


def test_the_memory_of_a_grammar_is_measured_and_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    source = StructuredOutputs(json='{"type": "integer", "multipleOf": 40009}')

    assert GrammarCompiler(Tokenizer(DEMO)).compile(source).num_bytes > 1 << 22
    monkeypatch.setitem(BOUNDS, "compiled_bytes", 1 << 22)
    with pytest.raises(InvalidParameterError, match="MiB of memory; at most 4 MiB are allowed"):
        GrammarCompiler(Tokenizer(DEMO)).compile(source)
