"""The form of an answer: a request's schema, pattern or grammar becomes a checked grammar."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import SamplingParams, Structure, StructuredOutputs
from dist_aclgraph.text import grammar_process, template_process
from dist_aclgraph.text.grammars import PARSER_LIMITS, Vocabulary, vocabulary_of
from dist_aclgraph.text.tokenizer import Tokenizer

NAMES_OF_KINDS = {"json": "the JSON schema", "regex": "the regular expression", "lark": "a schema"}
MAX_PROCESSES = 2
MAX_KEPT = 1024  # results that are kept
WAIT_S = 30.0  # for an answer of the process, which first prepares its vocabulary
BOUNDS = {"cpu_s": 1, "memory_bytes": 1 << 30}


@dataclass(frozen=True)
class Thinking:
    """Where the reasoning of an answer is.

    Attributes:
        begin, end: tokens around the reasoning; -1 if the model has no such token.
        is_open: whether the prompt has begun the reasoning.
    """

    begin: int
    end: int
    is_open: bool


class GrammarCompiler:
    """Compiles sources of grammars in processes with limits. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._permits = threading.BoundedSemaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._known: OrderedDict[tuple[str, str, str, str | None], dict[str, str]] = OrderedDict()

    def compile(self, source: StructuredOutputs, salt: str = "", param: str = "") -> str:
        """Return the grammar of a source.

        Args:
            salt: results are shared only between requests with the same salt.
            param: the field of the request that has the source.

        Raises:
            InvalidParameterError: the source is wrong, is not supported, or takes too long.
        """
        if not self._tokenizer.eos_ids or not self._tokenizer.has_text:
            raise InvalidParameterError(
                "structured outputs need a model with a tokenizer.json and an end token", param
            )
        key = (salt, source.kind, source.text, str(source.json_options))
        with self._lock:
            reply = self._known.get(key)
        if reply is None:
            reply = self._ask(
                {"kind": source.kind, "text": source.text, "json_options": source.json_options}
            )
            with self._lock:
                self._known[key] = reply
                if len(self._known) > MAX_KEPT:
                    self._known.popitem(last=False)
        if "error" in reply:
            name = param or "structured_outputs"
            what = NAMES_OF_KINDS.get(source.kind, source.kind)
            raise InvalidParameterError(f"{name}: {what} cannot be used: {reply['error']}", name)
        return reply["grammar"]

    def close(self) -> None:
        """End the processes."""
        while self._idle:
            self._idle.pop().close()

    def _ask(self, source: Mapping[str, Any]) -> dict[str, str]:
        with self._permits:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or not process.is_alive():
                process = self._start()
            try:
                reply = process.ask(source)
            except BaseException:
                process.close()
                raise
            with self._lock:
                self._idle.append(process)
        return reply

    def _start(self) -> _Process:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer)
            found = self._vocabulary
        return _Process({**found._asdict(), "parser": PARSER_LIMITS, "bounds": BOUNDS})


class _Process:
    """One process that compiles; see ``grammar_process``."""

    def __init__(self, first: Mapping[str, Any]) -> None:
        folders = {str(Path(str(m.__file__)).parents[1]) for m in (llguidance, np)}
        folders.add(str(Path(grammar_process.__file__).parents[2]))
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(WAIT_S)
        self._incoming = self._socket.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", grammar_process.__file__, *folders],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        self._first = template_process.packed(first)

    def ask(self, source: Mapping[str, Any]) -> dict[str, str]:
        try:
            self._socket.sendall(self._first + template_process.packed(source))
            self._first = b""
            reply: dict[str, str] = template_process.receive(self._incoming)
        except (EOFError, OSError) as e:
            raise InvalidParameterError(
                f"the process that compiles grammars gave no answer ({e!r:.80}); try again",
                "structured_outputs",
            ) from None
        return reply

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def with_structure(
    params: SamplingParams,
    compiler: GrammarCompiler,
    thinking: Thinking | None = None,
    *,
    salt: str = "",
    param: str = "structured_outputs",
) -> SamplingParams:
    """Return parameters whose ``structure`` says what ``structured_outputs`` and
    ``thinking_tokens`` ask for.

    Args:
        thinking: where the answer's reasoning is; None without reasoning.
        param: the field of the request, for errors.

    Raises:
        InvalidParameterError: the source of a grammar is wrong, or the reasoning has no end token.
    """
    source, most = params.structured_outputs, params.thinking_tokens
    if source is None and (most is None or thinking is None):
        return params
    if thinking is not None and thinking.end < 0:
        raise InvalidParameterError(
            f"{'thinking_tokens' if source is None else param}: the end of this model's reasoning "
            "is not one token; turn its reasoning off",
            param,
        )
    grammar = "" if source is None else compiler.compile(source, salt, param)
    structure = Structure(grammar=grammar, salt=salt)
    if thinking is not None:
        structure = replace(
            structure,
            think_begin=thinking.begin,
            think_end=thinking.end,
            is_thinking=thinking.is_open,
            max_thought=-1 if most is None else most,
        )
    return replace(params, structure=structure)
