"""Scanner: reads an answer that arrives token by token, and collects its events.

A format is a generator that reads an answer step by step: "copy text until this marker, then read a
name". The generator yields when it needs more text; ``Reader`` resumes it with the next token. The
events do not depend on how the answer is divided into deltas.

Many markers are single tokens of the vocabulary. If a model spells the text of such a marker in
other tokens, the text is content. The scanner writes an unpaired surrogate in place of each marker
token. Decoded text never contains unpaired surrogates. ``Scanner.coded`` translates a marker into
this form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from dist_aclgraph.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)

T = TypeVar("T")
Scan: TypeAlias = Generator[None, None, T]  # reads a part of an answer, and returns a result
Emit: TypeAlias = Callable[[str], None]

FIRST_CODE = 0xD800
MAX_HEAD_CHARS = 256  # maximum length of the text between a call's first marker and its arguments
MAX_HELD_CHARS = 1 << 16  # maximum length of a value that is passed on as a whole
_SPACE = re.compile(r"\s*")
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]\ud800-\udfff]')
_INSIDE_STRINGS = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_END_OF_WORD = re.compile(r"[\s,\]}\ud800-\udfff]")


class Scanner:
    """Contains the unread text of one answer, and the events of the text that was read.

    Args:
        token_ids: maps each marker that is a single token to the token's id.
        holds_space: whether white space after content is held back, so that it can be removed if a
            call follows. If false, white space is content like other text.

    Attributes:
        in_thought: whether the text that was read last is reasoning.
        num_calls: number of calls that have begun.
        left_out: texts that are removed from content.
    """

    def __init__(self, token_ids: Mapping[str, int], *, holds_space: bool) -> None:
        self._token_ids = token_ids
        self._codes = {
            text: chr(FIRST_CODE + i) for i, text in enumerate(sorted(token_ids, key=len)[::-1])
        }
        self.code_of_token = {token_ids[text]: code for text, code in self._codes.items()}
        self._texts = str.maketrans({code: text for text, code in self._codes.items()})
        self._holds_space = holds_space
        self._text = ""
        self._at = 0
        self._kept: int | None = None  # index of the first kept character; None if no text is kept
        self.is_closed = False
        self._events: list[Event] = []
        self._space: list[str] = []  # held-back white space of the content
        self._between = ""  # white space between content and a call after it
        self._newlines: list[str] = []  # held-back newlines from the end of the reasoning
        self._is_after_reasoning = False
        self._has_content = False
        self.in_thought = False
        self.num_calls = 0
        self.left_out: tuple[str, ...] = ()
        self.strings_end = True  # false if a string within JSON was never closed

    def trial(self) -> Scanner:
        """Return a new scanner that has the same marker tokens, and has read nothing yet."""
        return Scanner(self._token_ids, holds_space=self._holds_space)

    # ---- text

    def feed(self, text: str) -> None:
        """Append text, in which marker tokens are coded."""
        start = self._at if self._kept is None else self._kept
        self._text = self._text[start:] + text
        self._at -= start
        if self._kept is not None:
            self._kept = 0

    def coded(self, text: str) -> str:
        """Return a text with its marker tokens in their coded form."""
        for marker, code in self._codes.items():
            text = text.replace(marker, code)
        return text

    def shown(self, text: str) -> str:
        """Return a text with its marker tokens as the model's vocabulary writes them."""
        return text if text.isascii() else text.translate(self._texts)

    def has_marker(self, text: str) -> bool:
        """Return whether a text contains a marker token in its coded form."""
        return self.shown(text) != text

    def unread(self, text: str) -> None:
        """Put back text that was read, so that it is read again."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def keep(self) -> None:
        """Keep all text that is read after this call, until ``give_back`` or ``let_go`` is
        called.
        """
        self._kept = self._at

    def give_back(self, marker: str = "") -> str:
        """Return the kept text without the marker at its end, and stop keeping text."""
        assert self._kept is not None
        text = self._text[self._kept : self._at]
        self._kept = None
        return text.removesuffix(marker)

    def let_go(self) -> None:
        """Stop keeping text, and drop the kept text."""
        self._kept = None

    @property
    def is_keeping(self) -> bool:
        return self._kept is not None

    def copy_until(
        self, markers: Sequence[str], emit: Emit, *, in_call: bool = False
    ) -> Scan[str | None]:
        """Read text up to the first place where one of ``markers`` occurs, and read this marker.

        Args:
            emit: a function that is called with the text before the marker, in pieces. If the end
                of a piece may be the beginning of a marker, this end is held back until more text
                has arrived.
            in_call: whether the text is a part of a call. If the answer ends within a marker,
                ``emit`` gets the beginning of the marker outside of calls, but not within a call.

        Returns:
            the marker; None at the end of the answer.
        """
        left_out = self.left_out if emit == self.content else ()
        whole, begun = _patterns((*markers, *left_out))
        while True:
            found = whole.search(self._text, self._at)
            end = found.start() if found else self._end_without(begun, in_call)
            if end > self._at:
                piece, self._at = self._text[self._at : end], end
                emit(piece)
            if found:
                self._at = found.end()
                if found.group() in left_out:
                    continue
                return found.group()
            if self.is_closed:
                self._at = len(self._text)
                return None
            yield

    def _end_without(self, begun: re.Pattern[str], in_call: bool) -> int:
        if self.is_closed and not in_call:
            return len(self._text)
        found = begun.search(self._text, self._at)
        return found.start() if found else len(self._text)

    def read_until(self, markers: Sequence[str]) -> Scan[tuple[str, str | None]]:
        """Return the text up to one of the markers, and the marker."""
        pieces: list[str] = []
        marker = yield from self.copy_until(markers, pieces.append)
        return "".join(pieces), marker

    def read_head(self, markers: Sequence[str]) -> Scan[tuple[str, str | None]]:
        """Return the text up to one of the markers, and the marker. If the text has more than
        ``MAX_HEAD_CHARS`` characters, read and return only its beginning, with None in place of the
        marker.
        """
        whole, begun = _patterns(tuple(markers))
        while True:
            found = whole.search(self._text, self._at)
            end = found.start() if found else self._end_without(begun, in_call=False)
            start, most = self._at, self._at + MAX_HEAD_CHARS
            if found and end <= most:
                self._at = found.end()
                return self._text[start:end], found.group()
            if end > most or self.is_closed:
                self._at = min(end, most)
                return self._text[start : self._at], None
            yield

    def match(self, *texts: str) -> Scan[str | None]:
        """If the unread text begins with one of ``texts``, read this text and return it. If several
        of ``texts`` match, read the longest text. If none matches, read nothing and return None.
        """
        while True:
            rest = self._text[self._at :]
            may_grow = any(len(rest) < len(text) and text.startswith(rest) for text in texts)
            if not may_grow or self.is_closed:
                break
            yield
        found = [text for text in texts if rest.startswith(text)]
        if not found:
            return None
        longest = max(found, key=len)
        self._at += len(longest)
        return longest

    def skip_space(self) -> Scan[str]:
        """Read white space and return it."""
        read = ""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            read += found.group()
            self._at = found.end()
            if self._at < len(self._text) or self.is_closed:
                return read
            yield

    def peek(self) -> Scan[str]:
        """Return the next character without reading it; empty at the end of the answer."""
        while self._at == len(self._text) and not self.is_closed:
            yield
        return self._text[self._at : self._at + 1]

    def is_cut(self, *markers: str) -> bool:
        """Return whether the rest of the answer is empty, or is only the beginning of a marker.
        This method reads this beginning.
        """
        rest = self._text[self._at :]
        if not self.is_closed or not any(marker.startswith(rest) for marker in markers):
            return False
        self._at = len(self._text)
        return True

    # ---- JSON

    def copy_json(self, emit: Emit, most: int | None = None) -> Scan[bool]:
        """Read one JSON value and pass it on piece by piece, as the model wrote it. JSON allows no
        control characters in strings; this method replaces them by escapes.

        A marker token ends the value, even within a string.

        Args:
            most: maximum number of characters; a longer value is not read to its end.

        Returns:
            whether the value is complete.
        """
        num_read = 0
        first = yield from self.peek()
        if first not in '{["':
            return (yield from self._copy_word(emit))
        depth, is_string = 0, False
        while True:
            start = at = self._at
            ended: bool | None = None
            while ended is None:
                found = (_INSIDE_STRINGS if is_string else _OUTSIDE_STRINGS).search(self._text, at)
                if found is None:
                    at = len(self._text)
                    break
                at, sign = found.end(), found.group()
                if sign == "\\":
                    if at == len(self._text):  # the escaped character has not arrived
                        at -= 1
                        break
                    at += 1
                elif sign < " ":
                    emit(self._text[start : at - 1] + json.dumps(sign)[1:-1])
                    num_read += at - start
                    start = at
                elif sign == '"':
                    is_string = not is_string
                    ended = True if not is_string and depth == 0 else None
                elif sign in "{[":
                    depth += 1
                elif sign in "}]":
                    depth -= 1
                    ended = True if depth == 0 else None
                else:  # a marker token ends the value
                    at -= 1
                    ended = False
            self._at = at
            if at > start:
                emit(self._text[start:at])
            num_read += at - start
            if most is not None and num_read > most:
                return False
            if ended is not None:
                return ended
            if self.is_closed:
                if rest := self._text[at:]:
                    self._at = len(self._text)
                    emit(rest)
                return False
            yield

    def _copy_word(self, emit: Emit) -> Scan[bool]:
        """Read a number, true, false or null."""
        num_read = 0
        while True:
            found = _END_OF_WORD.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            if end > self._at:
                piece, self._at = self._text[self._at : end], end
                num_read += len(piece)
                emit(piece)
            if found or self.is_closed:
                return num_read > 0
            yield

    def read_json(self, most: int = MAX_HELD_CHARS) -> Scan[str | None]:
        """Return the text of one JSON value; None if it is incomplete or too long."""
        pieces: list[str] = []
        is_whole = yield from self.copy_json(pieces.append, most)
        return "".join(pieces) if is_whole else None

    def read_json_string(self, most: int = MAX_HELD_CHARS) -> Scan[str | None]:
        """Return the value of a JSON string; None if something else comes next, or the string is
        too long.
        """
        if (yield from self.peek()) != '"':
            return None
        text = yield from self.read_json(most)
        if text is None:
            return None
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return None
        return with_pairs(str(value))

    # ---- events

    def content(self, text: str) -> None:
        for each in self.left_out:
            text = text.replace(each, "")
        if self._is_after_reasoning:
            text = text.lstrip("\n")
            if not text:
                return
            self._is_after_reasoning = False
        if self._holds_space:
            kept = text.rstrip()
            if not kept:
                self._space.append(text)
                return
            space, self._space = "".join(self._space), [text[len(kept) :]]
            text = space + kept
            if self.num_calls and not self._has_content:
                text = text.lstrip()
            elif not text[:1].isspace():
                text = self._between + text
            self._between = ""
        if text:
            self._has_content = True
            self._events.append(Content(self.shown(text)))

    def reasoning(self, text: str) -> None:
        kept = text.rstrip("\n")
        if not kept:
            self._newlines.append(text)
            return
        newlines, self._newlines = "".join(self._newlines), [text[len(kept) :]]
        self._events.append(Reasoning(self.shown(newlines + kept)))

    def begin_reasoning(self) -> Scan[None]:
        """Skip the newlines at the beginning of the reasoning."""
        self.in_thought = True
        while (yield from self.match("\n")):
            pass

    def end_reasoning(self) -> None:
        """Leave out the newlines between reasoning and content. Templates add them to the next
        prompt.
        """
        self._newlines = []
        self._is_after_reasoning = True
        self.in_thought = False

    def begin_call(self, name: str, call_id: str = "") -> None:
        if self._has_content:
            self._between = self._between or "".join(self._space)
        self._space = []
        self._is_after_reasoning = False
        self._events.append(CallBegin(self.num_calls, self.shown(name), self.shown(call_id)))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.num_calls - 1, self.shown(text)))

    def end_call(self) -> None:
        self._events.append(CallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """Emit the text that was held back, at the end of the answer. White space after a call is
        left out.
        """
        if newlines := "".join(self._newlines):
            self._events.append(Reasoning(newlines))
        if (space := "".join(self._space)) and not self.num_calls:
            self._events.append(Content(space))
        self._newlines, self._space = [], []

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class Reader:
    """Turns the tokens of one answer into events.

    Args:
        read: the format: a generator that reads from the scanner until the end of the answer.
        token_ids: maps each marker of the format that is a single token to the token's id.
        holds_space: see ``Scanner``.

    Attributes:
        num_thought_tokens: number of tokens of the reasoning, including the markers around it.
    """

    def __init__(
        self,
        read: Callable[[Scanner], Scan[None]],
        token_ids: Mapping[str, int],
        *,
        holds_space: bool,
    ) -> None:
        self._scanner = Scanner(token_ids, holds_space=holds_space)
        self._codes = self._scanner.code_of_token
        self.num_thought_tokens = 0
        self._scan = read(self._scanner)
        next(self._scan)

    def feed(self, token_id: int, text: str) -> list[Event]:
        """Add one token, and return the events that have become certain."""
        scanner = self._scanner
        text = self._codes.get(token_id, text)
        was_in_thought = scanner.in_thought
        if text:
            scanner.feed(text)
            next(self._scan)
        self.num_thought_tokens += was_in_thought or scanner.in_thought
        return scanner.take_events()

    def finish(self, text: str = "") -> list[Event]:
        """End the answer, and return the last events. The argument ``text`` is the last part of the
        answer's text, after the text passed to ``feed``.
        """
        self._scanner.feed(text)
        self._scanner.is_closed = True
        for _ in self._scan:
            raise AssertionError("a format must not wait for text after the end of the answer")
        self._scanner.finish()
        return self._scanner.take_events()


def with_pairs(text: str) -> str:
    """Join each pair of surrogates in a text to one character. An unpaired surrogate, which UTF-8
    cannot encode, becomes a replacement character.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@lru_cache(maxsize=256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns: for a marker, and for the beginning of a marker at the end of a text."""
    by_length = sorted(markers, key=len, reverse=True)
    parts = {marker[:size] for marker in markers for size in range(1, len(marker))}
    begun = "|".join(re.escape(part) for part in sorted(parts, key=len, reverse=True))
    return (
        re.compile("|".join(map(re.escape, by_length)) or r"(?!)"),
        re.compile(f"(?:{begun})\\Z" if begun else r"(?!)"),
    )
