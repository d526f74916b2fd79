"""Converts a request's schema, pattern or grammar to a checked grammar, which determines the output
format.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import llguidance
import numpy as np

from dist_aclgraph.errors import (
    EngineUnavailableError,
    InvalidParameterError,
    UnusableToolError,
)
from dist_aclgraph.sampling import SamplingParams, Structure, StructuredOutputs
from dist_aclgraph.text import grammar_process, template_process
from dist_aclgraph.text.child_process import ChildProcess, close_all
from dist_aclgraph.text.grammars import PARSER_LIMITS, Vocabulary, vocabulary_of
from dist_aclgraph.text.tokenizer import Tokenizer

NAMES_OF_KINDS = {"json": "the JSON schema", "regex": "the regex", "lark": "the form of the answer"}
MAX_PROCESSES = 2
MAX_KEPT_CHARS = 1 << 24  # maximum number of characters of all kept sources and grammars
# time limit for a reply, including the time in which a new process prepares its vocabulary
WAIT_S = 30.0
# salt of the cache, and kind, text and options of the source
_Key: TypeAlias = tuple[str, str, str, str]
# The limits of one compilation. ``compiled_bytes`` limits the compiled grammar, which every rank
# stores.
BOUNDS = {"cpu_s": 1, "memory_bytes": 1 << 30, "compiled_bytes": 1 << 26}


class Compiled(NamedTuple):
    """A checked grammar.

    Attributes:
        is_slow: whether the computation of its masks can take longer than a step.
        num_bytes: memory that the compiled grammar takes.
    """

    grammar: str = ""
    is_slow: bool = False
    num_bytes: int = 0


@dataclass(frozen=True)
class Thinking:
    """The tokens that mark the reasoning of an answer.

    Attributes:
        begin, end: tokens around the reasoning; -1 if the model has no such token.
        is_open: whether the answer begins inside the reasoning, because the prompt has the begin
            token.
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
        self._idle: list[ChildProcess] = []
        weakref.finalize(self, close_all, self._idle)
        self._known: OrderedDict[_Key, dict[str, str]] = OrderedDict()
        self._num_chars = 0  # number of characters of all items in ``_known``

    def compile(self, source: StructuredOutputs, salt: str = "", param: str = "") -> Compiled:
        """Return the grammar of a source.

        Args:
            salt: requests share a cached grammar only if they have the same salt.
            param: the request's field that contains the source; used in error messages.

        Raises:
            UnusableToolError: the schemas of some tools in a grammar of calls cannot be used.
            InvalidParameterError: the source is wrong, is not supported, or takes too long.
            EngineUnavailableError: two processes in a row ended without a reply.
        """
        if not self._tokenizer.eos_ids or not self._tokenizer.has_text:
            raise InvalidParameterError(
                "structured outputs need a model with a tokenizer.json and an end token", param
            )
        key = _key_of(source, salt)
        with self._lock:
            reply = self._known.get(key)
            if reply is not None:
                self._known.move_to_end(key)
        if reply is None:
            reply = self._ask(
                {"kind": source.kind, "text": source.text, "json_options": source.json_options}
            )
            with self._lock:
                self._keep(key, reply)
        if "error" in reply:
            name = param or "structured_outputs"
            what = NAMES_OF_KINDS.get(source.kind, source.kind)
            message = f"{name}: {what} cannot be used: {reply['error']}"
            if tools := reply.get("tools", ""):
                raise UnusableToolError(message, name, tuple(tools.split()))
            raise InvalidParameterError(message, name)
        return Compiled(reply["grammar"], bool(reply["slow"]), int(reply["bytes"]))

    def knows(self, source: StructuredOutputs, salt: str = "") -> bool:
        """Return whether the result of ``compile`` for these arguments is already known."""
        return _key_of(source, salt) in self._known

    def _ask(self, source: Mapping[str, Any]) -> dict[str, str]:
        with self._permits:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or self._start()
            reply = self._try(process, source)
            if reply is None:
                process = self._start()
                reply = self._try(process, source)
            if reply is None:
                raise EngineUnavailableError("the process that compiles grammars did not reply")
            with self._lock:
                self._idle.append(process)
        return reply

    @staticmethod
    def _try(process: ChildProcess, source: Mapping[str, Any]) -> dict[str, str] | None:
        """Return the process's reply. If the process does not reply, end the process and return
        None.
        """
        try:
            return process.ask(source)
        except (EOFError, OSError):
            process.close()
        except BaseException:
            process.close()
            raise
        return None

    def _keep(self, key: _Key, reply: dict[str, str]) -> None:
        if key in self._known:
            return
        self._known[key] = reply
        self._num_chars += _num_chars(key, reply)
        while self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= _num_chars(*self._known.popitem(last=False))

    def _start(self) -> ChildProcess:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer)
            vocabulary = self._vocabulary
        first = {**vocabulary._asdict(), "parser": PARSER_LIMITS, "bounds": BOUNDS}
        return ChildProcess(grammar_process, (llguidance, np, template_process), first, WAIT_S)


def _key_of(source: StructuredOutputs, salt: str) -> _Key:
    return salt, source.kind, source.text, str(source.json_options)


def _num_chars(key: _Key, reply: Mapping[str, str]) -> int:
    return sum(map(len, (*key, *reply.values())))


def with_structure(
    params: SamplingParams,
    compiler: GrammarCompiler,
    thinking: Thinking | None = None,
    *,
    salt: str = "",
    param: str = "structured_outputs",
) -> SamplingParams:
    """Return parameters whose ``structure`` has the output format (``structured_outputs``) and the
    limit of reasoning (``thinking_tokens``).

    Args:
        thinking: the tokens around the reasoning; None if there is no reasoning.
        param: the request's field with the output format or the limit; used in error messages.

    Raises:
        InvalidParameterError: the source of a grammar is wrong, or no token of the model ends the
            reasoning.
    """
    source, most = params.structured_outputs, params.thinking_tokens
    if source is None and (most is None or thinking is None):
        return params
    if thinking is not None and thinking.end < 0:
        raise InvalidParameterError(
            f"{param}: the end of this model's reasoning is not one token; turn its reasoning off",
            param,
        )
    found = Compiled() if source is None else compiler.compile(source, salt, param)
    structure = Structure(**found._asdict(), salt=salt)
    if thinking is not None:
        structure = replace(
            structure,
            think_begin=thinking.begin,
            think_end=thinking.end,
            is_thinking=thinking.is_open,
            max_thought=-1 if most is None else most,
        )
    return replace(params, structure=structure)
