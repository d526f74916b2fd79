"""Llama 3.2 and Llama 4 (pythonic): the whole answer is ``[f(a=1, b="x"), g()]``.

An answer that begins like a call is a call only if the name in it is the name of a given tool.
After ``<|python_start|>``, calls can also follow text.
"""

from __future__ import annotations

from dist_aclgraph.formats.lark import Lark
from dist_aclgraph.formats.python_call import copy_call, lark_call
from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

__all__ = ["BEGINS", "MARKERS", "fits", "lark_call", "lark_calls", "lark_text", "read"]

TAGS = ("<|python_start|>", "<|python_end|>")
MARKERS = TAGS
BEGINS = ()  # a call without tags must begin at the answer's first character


def fits(template: str) -> bool:
    return any(text in template for text in ("func_name1(params_name1=", "func_name1(param1="))


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    tag: str | None = ""
    while tag is not None:
        yield from _copy_list(scanner, tools, tag)
        tag = yield from scanner.copy_until([scanner.coded(TAGS[0])], scanner.content)


def _copy_list(scanner: Scanner, tools: Tools, before: str) -> Scan[None]:
    """Read a list of calls, if a list comes next.

    Args:
        before: the tag before the list; empty at the beginning of the answer.
    """
    begin, end = map(scanner.coded, TAGS)
    scanner.keep()
    yield from scanner.skip_space()
    while (yield from scanner.match(begin)):
        yield from scanner.skip_space()
    if (yield from scanner.match("[")):
        yield from scanner.skip_space()
        is_call = yield from copy_call(scanner, tools)
        while is_call:
            before = ""
            scanner.keep()
            yield from scanner.skip_space()
            if not (yield from scanner.match(",")):
                yield from scanner.match("]")
                scanner.let_go()
                yield from scanner.match(end)
                scanner.keep()
                break
            yield from scanner.skip_space()
            is_call = yield from copy_call(scanner, tools)
    if scanner.is_keeping:
        scanner.content(before + scanner.give_back())


def lark_calls(lark: Lark, call: str, *, several: bool) -> str:
    inner = f'{call} (", " {call})*' if several else call
    begin, end = (f"({lark.text(tag)})?" if lark.is_token(tag) else "" for tag in TAGS)
    return f'{begin} "[" {inner} "]" {end}'


def lark_text(lark: Lark, tools: Tools) -> str:
    return lark.text_unless("[", TAGS[0])
