"""The number of kept grammars is limited, but a waiting request always gets its grammar."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dist_aclgraph.engine.grammars import MAX_KEPT_CHARS, Grammars


def test_a_grammar_that_is_not_compiled_yet_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_compile = threading.Event()
    compiled: list[str] = []

    def compile_late(self: Grammars, grammar: str) -> Any:
        may_compile.wait()
        compiled.append(grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    nothing: Any = None
    grammars = Grammars(lambda: nothing)
    texts = [str(i) * (MAX_KEPT_CHARS // 4) for i in range(9)]

    waiting = [grammars.compile(text, "") for text in texts]
    again = [grammars.compile(text, "") for text in texts]
    may_compile.set()
    for future in waiting:
        future.result(60)

    assert again == waiting
    assert compiled == texts
    grammars.compile("x", "")
    assert grammars.compile(texts[0], "") is not waiting[0], "old grammars are forgotten"
