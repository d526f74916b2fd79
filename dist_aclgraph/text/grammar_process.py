"""The process that compiles the grammars of requests; ``structure`` starts it by its path.

Compiling a hostile schema can take any time and memory. So each grammar is compiled in a fork of
this process, and the kernel limits the fork. The process itself has one thread and the prepared
vocabulary, so a fork takes milliseconds. Messages have the format of ``template_process``: the
first message contains the vocabulary and the limits, each later message contains one source of a
grammar.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

if __name__ == "__main__":
    # This process runs an isolated Python (-I -S), so the folders of packages are added.
    sys.path.extend(sys.argv[1:])

import llguidance
import llguidance.numpy
import numpy as np

from dist_aclgraph.formats.equivalents import use_equivalents
from dist_aclgraph.formats.one_of import is_any_of
from dist_aclgraph.formats.regex_dialect import in_dialect
from dist_aclgraph.formats.tools import TOOL_PART
from dist_aclgraph.text.grammar_errors import LINE, reason_of
from dist_aclgraph.text.template_process import packed, receive

# A grammar counts as slow if its first two masks take more than this CPU time, in seconds. Workers
# compute the masks of slow grammars on a separate thread. In a fork, the first mask of every
# grammar takes several milliseconds, because the fork copies the vocabulary.
SLOW_S = 0.05
# A schema also counts as slow if its grammar has at least this number of characters.
SLOW_CHARS = 1 << 15


def make_grammar(source: dict[str, Any]) -> str:
    """Return a grammar of llguidance.

    Args:
        source: ``kind`` and ``text``; for a JSON schema also ``json_options``.

    Raises:
        ValueError: the source cannot be read.
    """
    kind, text = source["kind"], source["text"]
    if kind == "json":
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        use_equivalents(schema)
        if schema == {"enum": []}:
            raise ValueError("no value matches the schema")
        schema.pop("x-guidance", None)  # options of the library, which clients must not set
        options: Any = {**source["json_options"], "coerce_one_of": is_any_of(schema)}
        if not options["coerce_one_of"]:
            raise ValueError(
                "oneOf is taken only where its branches exclude each other, by types or by "
                "constants of a required property; use anyOf"
            )
        return llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), overrides=options
        )
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(in_dialect(text))
    if kind == "grammar":
        kind = "gbnf" if "::=" in text else "lark"
    return llguidance.grammar_from(kind, text)


def compile_source(
    source: dict[str, Any],
    tokenizer: llguidance.LLTokenizer,
    limits: llguidance.LLParserLimits,
) -> dict[str, str]:
    """Return a dictionary with the source's ``grammar``, or with the first ``error`` in
    the source.

    If the error is in the schema of a tool, ``tools`` contains the names of all tools whose schemas
    cannot be used.

    ``slow`` is not empty if the computation of masks can take a long time. Every grammar that a
    client wrote counts as slow, because the time depends on the text of the answer. ``bytes`` is
    the memory that the compiled grammar takes.
    """
    before = _private_bytes()
    try:
        grammar = make_grammar(source)
    except Exception as e:  # the library raises ValueError, but also errors of other classes
        return {"error": reason_of(str(e))}
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        # Computing the mask of the first token can take longer than compiling.
        words = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
        begin_s = time.thread_time()
        llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if len(allowed) and not matcher.is_error():
            matcher.try_consume_tokens([int(allowed[0])])
            llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
        took_s = time.thread_time() - begin_s
        if not matcher.is_error():
            num_bytes = max(0, _private_bytes() - before)
            is_large = len(grammar) >= SLOW_CHARS
            is_slow = source["kind"] == "grammar" or is_large or took_s > SLOW_S
            slow = "yes" if is_slow else ""
            return {"grammar": grammar, "slow": slow, "bytes": str(num_bytes)}
    part, reason = _part_of(source, matcher.get_error()), reason_of(matcher.get_error())
    if not part.startswith(TOOL_PART):
        return {"error": f"{part}: {reason}" if part else reason}
    tools = " ".join(_unusable_tools(source, matcher, tokenizer, limits))
    return {"error": f"{part}: {reason}", "tools": tools}


def _unusable_tools(
    source: dict[str, Any],
    matcher: llguidance.LLMatcher,
    tokenizer: llguidance.LLTokenizer,
    limits: llguidance.LLParserLimits,
) -> list[str]:
    """Return the names of all tools whose schemas cannot be used.

    Args:
        matcher: llguidance's matcher, which has stopped at the first error of the grammar.
    """
    found: dict[str, None] = {}
    lines = source["text"].split("\n")
    # The library stops at the first error. So each wrong rule is replaced by an empty rule, and the
    # library then stops at the next error.
    for _ in range(len(lines)):
        part = _part_of(source, matcher.get_error())
        if not matcher.is_error() or not part.startswith(TOOL_PART):
            break
        found[part.removeprefix(TOOL_PART)] = None
        at = _line_of(matcher.get_error()) - 1
        lines[at] = lines[at].split(":", 1)[0] + ': ""'
        grammar = llguidance.grammar_from("lark", "\n".join(lines))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    return list(found)


def _private_bytes() -> int:
    """Return the bytes of this process's private memory. File pages are not counted, because a fork
    maps a file page only when the fork reads this page.
    """
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * resource.getpagesize()


def _part_of(source: dict[str, Any], message: str) -> str:
    """Return the name of the grammar's part that contains an error; empty if this is unknown."""
    if source["kind"] != "lark":
        return ""
    before = source["text"].split("\n")[: _line_of(message)]
    parts = [line.removeprefix("// ") for line in before if line.startswith("// ")]
    return parts[-1] if parts else ""


def _line_of(message: str) -> int:
    """Return the number of the line that contains an error; lines are counted from 1. Return 0 if
    the line is unknown.
    """
    found = LINE.match(message)
    return 0 if found is None else int(found.group(1))


def _compile_in_fork(
    source: dict[str, Any],
    tokenizer: llguidance.LLTokenizer,
    limits: llguidance.LLParserLimits,
    bounds: dict[str, int],
) -> dict[str, str]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (bounds["cpu_s"],) * 2)
        resource.setrlimit(resource.RLIMIT_AS, (bounds["memory_bytes"],) * 2)
        reply = compile_source(source, tokenizer, limits)
        num_bytes, most = int(reply.get("bytes", 0)), bounds["compiled_bytes"]
        if num_bytes > most:
            problem = f"takes {num_bytes >> 20} MiB of memory; at most {most >> 20} MiB are allowed"
            reply = {"error": f"its compiled form {problem}"}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(reply).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status == 0:
        reply_of_fork: dict[str, str] = json.loads(answer)
        return reply_of_fork
    # The soft and the hard limit are equal, so that the kernel sends SIGKILL at the limit.
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return {"error": f"compiling it takes more than {bounds['cpu_s']} s"}
    return {"error": f"compiling it takes more than {bounds['memory_bytes'] >> 20} MiB of memory"}


def main() -> None:
    """Compile until the parent closes the socket. Standard input and output are this socket."""
    # This process ignores Ctrl-C, because its parent may still drain requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    first = receive(incoming)
    tokenizer = llguidance.LLTokenizer(
        first["tokenizer"], n_vocab=first["size"], eos_token=first["end_ids"]
    )
    limits = llguidance.LLParserLimits(**first["parser"])
    while True:
        reply = _compile_in_fork(receive(incoming), tokenizer, limits, first["bounds"])
        outgoing.write(packed(reply))
        outgoing.flush()


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        main()
