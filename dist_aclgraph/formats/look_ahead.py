"""Replaces look-aheads at the beginning of a regular expression by further regular expressions.

llguidance supports no look-aheads. Schemas of zod (e-mail addresses) and of pydantic (decimals)
contain look-aheads.
"""

from __future__ import annotations

import re

MAX_LENGTH = 64  # maximum number of characters that a negative look-ahead may compare
ANY = r"[\s\S]"  # any character; a dot does not match line breaks
# A regular expression for one character: an escape, a class, or the character itself.
_ATOM = re.compile(
    r"\\[dDsSwWtnrfv]|\\[^\sA-Za-z0-9]|\[(?:\\.|[^\]\\\[])+\]|[^\\\[\](){}|^$*+?.]", re.DOTALL
)
_LOOK = re.compile(r"\(\?[=!]|\(\?<[=!]")
_BEGIN = re.compile(r"\(\?(?P<kind>[=!])")
_SWAPPED = re.compile(r"\\[dDsSwW]")
# A look-ahead of pydantic, which limits the number of digits. The look-ahead can be removed if the
# rest of the pattern allows at most this number of digits.
_DIGITS = re.compile(
    r"\(\?=\[\\d\.\]\{1,(?P<most>\d+)\}0\*\$\)"
    r"(?P<rest>\\d\{0,(?P<before>\d+)\}\\\.\\d\{0,(?P<after>\d+)\}0\*\$)"
)


def without_look_ahead(pattern: str) -> list[str] | None:
    """Return regular expressions that together replace ``pattern`` and have no look-aheads; None if
    this function cannot replace the look-aheads.

    If a text contains matches of all returned expressions, the text also contains a match of
    ``pattern``. A text with line breaks can contain a match of ``pattern`` even if some of these
    expressions are not found in it.
    """
    pattern = _DIGITS.sub(_without_digits, pattern)
    rest, found = pattern.removeprefix("^"), []
    while (begin := _BEGIN.match(rest)) and rest != pattern:
        end = _end_of_group(rest)
        if end is None:
            return None
        inner, rest = rest[begin.end() : end - 1], rest[end:]
        if begin["kind"] == "=":
            found.append(f"^(?:{inner})")
            continue
        for branch in _branches(inner):
            other = _other_than(branch.removeprefix("^"))
            if other is None:
                return None
            found.append(other)
    patterns = [f"^{rest}" if found else pattern, *found]
    # In ``^(?=...)a|b``, the look-ahead applies only to the first branch.
    is_divided = bool(found) and len(_split(rest)) > 1
    return None if is_divided or any(map(_LOOK.search, patterns)) else patterns


def _without_digits(match: re.Match[str]) -> str:
    # The limit of the look-ahead includes the decimal point.
    num_chars = int(match["before"]) + 1 + int(match["after"])
    return match["rest"] if num_chars <= int(match["most"]) else match[0]


def _other_than(text: str) -> str | None:
    """Return an expression for texts that do not begin with a match of ``text``; None if ``text``
    is not simple enough.
    """
    contains = text.startswith(".*")
    atoms, rest = _atoms(text[2:] if contains else text)
    if contains and not rest and len(set(atoms)) == 1 and len(atoms) <= 2:
        one, other = atoms[0], _complement(atoms[0])
        return f"^{other}*$" if len(atoms) == 1 else f"^{other}*(?:{one}{other}+)*{one}?$"
    if contains or len(atoms) > MAX_LENGTH:
        return None
    if not atoms:
        return f"^{ANY}" if rest == "$" else None
    if len(atoms) == 1 and rest in ("*$", "+$"):
        other = _complement(atoms[0])
        return other if rest == "*$" else f"^$|{other}"
    if rest not in ("", "$"):
        return None
    found = ""
    for i, atom in enumerate(reversed(atoms)):
        # If the expression ``text`` ends with "$", it does not match longer texts. The result must
        # match longer texts then.
        longer = f"{atom}(?:{found})" if i else f"{atom}{ANY}" * (rest == "$")
        found = "|".join(filter(None, ("$", _complement(atom), longer)))
    return f"^(?:{found})"


def _complement(atom: str) -> str:
    """Return an expression that matches exactly the characters that ``atom`` does not match."""
    if _SWAPPED.fullmatch(atom):
        return atom.swapcase()
    if atom.startswith("[^"):
        return f"[{atom[2:]}"
    return f"[^{atom[1:]}" if atom.startswith("[") else f"[^{atom}]"


def _atoms(text: str) -> tuple[list[str], str]:
    """Read atoms, which match one character each, from the beginning of a regular expression.
    Return the atoms and the rest. The rest begins at the first quantifier, or at the first
    character that is no atom.
    """
    found, at = [], 0
    while match := _ATOM.match(text, at):
        found.append(match[0])
        at = match.end()
    return found, text[at:]


def _branches(text: str) -> list[str]:
    """Return the branches of an alternation; a group around all branches is left out."""
    end = "$" * text.endswith(")$")
    group = text.removesuffix("$") if end else text
    is_group = group.startswith("(") and _end_of_group(group) == len(group)
    if is_group and (inner := re.match(r"\((?:\?:|(?!\?))", group)):
        return [branch + end for branch in _branches(group[inner.end() : -1])]
    return _split(text)


def _split(text: str) -> list[str]:
    found, depth, start = [], 0, 0
    for match in _tokens(text):
        if match[0] == "|" and not depth:
            found.append(text[start : match.start()])
            start = match.end()
        depth += {"(": 1, ")": -1}.get(match[0], 0)
    return [*found, text[start:]]


def _end_of_group(text: str) -> int | None:
    """A text begins with a group. Return the index of the character after this group; None if the
    group has no end.
    """
    depth = 0
    for match in _tokens(text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if not depth:
            return match.end()
    return None


def _tokens(text: str) -> list[re.Match[str]]:
    """Return the escapes, classes and other characters of a regular expression, in order."""
    return list(re.finditer(r"\\.|\[(?:\\.|[^\]\\])+\]|.", text, re.DOTALL))
