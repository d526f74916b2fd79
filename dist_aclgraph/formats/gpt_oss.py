"""gpt-oss (harmony): an answer is a sequence of messages on channels.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

``analysis`` is reasoning. A message to a function is a call. All other messages are content.
"""

from __future__ import annotations

import re

from dist_aclgraph.formats.scanner import Scan, Scanner
from dist_aclgraph.formats.tools import Tools

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def fits(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def read(scanner: Scanner, tools: Tools) -> Scan[None]:
    start, end, message, _, _, returned, call = map(scanner.coded, MARKERS)
    ends = (end, call, returned, start)
    while (yield from scanner.peek()):
        scanner.keep()
        head, marker = yield from scanner.read_until([message])
        if marker is None:
            scanner.content(scanner.give_back())
            return
        scanner.let_go()
        shown = scanner.shown(head)
        name = shown.partition(CHANNEL)[2].strip()
        recipient = _RECIPIENT.search(shown)
        if recipient is not None:
            scanner.begin_call(recipient.group(1))
            marker = yield from scanner.copy_until(ends, scanner.arguments, in_call=True)
            if marker is not None:
                scanner.end_call()
        elif name.startswith("analysis"):
            yield from scanner.begin_reasoning()
            if (yield from scanner.copy_until(ends, scanner.reasoning)) is not None:
                scanner.end_reasoning()
        else:
            yield from scanner.copy_until(ends, scanner.content)
