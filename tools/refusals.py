"""The refusals of the emulator, and the questions of the probe about these refusals.

``refusals_of`` reads the texts of all refusals from the emulator's sources. ``known_refusals`` has
an entry for each text. An entry contains the questions with which ``dist-aclgraph probe`` asks a
device about the refusal, or the reason why there is no question. ``python -m tools.refusals``
writes the page ``docs/develop/refusals.md``. It fails if a text has no entry, or if an entry's text
is not in the sources.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "emulator"
DATA = ROOT / "tools" / "known_refusals"
PAGE = ROOT / "docs" / "develop" / "refusals.md"

# The reasons why the probe does not ask a device about a refusal.
REASONS = {
    "undefined": "The arguments do not fit together, or the operator's interface does not have "
    "them. No result is defined.",
    "unused": "A document excludes the call. The runtime does not make such a call, and gains "
    "nothing from a device that accepts it.",
    "gap": "The emulator does not have this case, and the runtime does not use it. The questions "
    "that compare operators with the host ask about the runtime's calls.",
    "wheel": "torch_npu converts the arguments, or refuses the call, before CANN gets it.",
    "harmful": "The call reads or writes outside of a tensor. On a device it may damage other "
    "data.",
    "ranks": "A question would need more NPUs than the four that the probe uses.",
    "unknown_release": "The rule is known from one release of CANN only "
    "(docs/operate/hardware.md).",
    "misuse": "The calls are in an impossible order, or name something that does not exist. Only a "
    "defect of a program makes such calls.",
    "report": "The text reports an earlier failure: a dead process, a timeout, an abort.",
    "emulator": "The text concerns the emulator alone: its build, its settings, its faults, or the "
    "machine on which it runs.",
}

# Functions that refuse a call if their first argument is false.
_CONDITIONS = ("demand", "should", "must", "refuse_unless", "TORCH_CHECK")
# Functions that refuse every call, and classes of errors. Arguments before the text, such as an
# error code or the number of a device, are ignored.
_OTHERS = (
    *("refuse_unless_admitted", "fail", "stop_device"),
    *("Refusal", "TaskError", "runtime_error", "invalid_argument"),
)
_CALL = re.compile(rf"\b({'|'.join((*_CONDITIONS, *_OTHERS))})\s*\(")
_CODE = re.compile(r"\breturn ((?:ACL_ERROR|HCCL_E)_\w+);")
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_CONVERSION = re.compile(r"%[-#0-9.*]*(?:zu|ld|l?l?[dux]|[sdugpxc])|%%")
_ASKED = "asked"
_TITLE = "# Refusals of the emulator, and the questions of a probe"
_TEXT = (
    "`python -m tools.refusals` writes this page. The emulator's sources refuse calls in {total} "
    "places. A device may have other rules. For {asked} places, `dist-aclgraph probe` asks the "
    "device ([probe.md](../operate/probe.md)). For each of the other places, "
    "`tools/known_refusals/*.toml` has one of these reasons why there is no question:"
)
_WIDTH = 120  # maximum number of characters in a line of the page; tables can be wider
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Entry:
    """What is known about some refusals of a source file.

    Attributes:
        file: path of the source file, relative to the folder of the emulator.
        texts: the texts, as ``refusals_of`` returns them. A text that occurs at several places of
            the file is listed once for each place.
        questions: names of questions of the probe; empty if ``reason`` is given.
        reason: a key of ``REASONS``; "" if there are questions.
    """

    file: str
    texts: tuple[str, ...]
    questions: tuple[str, ...] = ()
    reason: str = ""


def known_refusals(folder: Path = DATA) -> list[Entry]:
    """Return the entries of all data files, in the order of the source files they describe."""
    entries = [
        Entry(
            file,
            tuple(group["texts"]),
            tuple(group.get("questions", ())),
            group.get("reason", ""),
        )
        for path in sorted(folder.glob("*.toml"))
        for file, groups in tomllib.loads(path.read_text()).items()
        for group in groups
    ]
    return sorted(entries, key=lambda entry: entry.file)


def differences(found: Mapping[str, Sequence[str]], entries: Sequence[Entry]) -> list[str]:
    """Return a line for each refusal without an entry, and for each entry without a refusal.

    If a text occurs at several places of a file, it needs one entry for each place.

    Args:
        found: the texts by file, as ``refusals_of`` returns them.
    """
    known = Counter((entry.file, text) for entry in entries for text in entry.texts)
    texts = Counter((file, text) for file, group in found.items() for text in group)
    return [
        *(f"{file}: no entry for {text!r}" for file, text in sorted((texts - known).elements())),
        *(
            f"{file}: no refusal for the entry {text!r}"
            for file, text in sorted((known - texts).elements())
        ),
    ]


def page_of(entries: Sequence[Entry]) -> str:
    """Return the page: the counts for each source file, and the questions for each text."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        row = counts.setdefault(entry.file, Counter())
        row[entry.reason or _ASKED] += len(entry.texts)
    columns = (_ASKED, *REASONS)
    total = sum(counts.values(), Counter())
    lines = [
        _TITLE,
        "",
        fill(_TEXT.format(total=total.total(), asked=total[_ASKED]), _WIDTH),
        "",
        *(_item(f"**{name}:** {text}") for name, text in REASONS.items()),
        "",
        "## Refusals by source file",
        "",
        f"| file | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(
            f"| {name} | {' | '.join(str(row[column] or '') for column in columns)} |"
            for name, row in (*counts.items(), ("all", total))
        ),
        "",
        "## Texts with questions",
        "",
        "A `*` in a text stands for a value.",
        "",
        *(
            _item(f"`{text}` ({entry.file}): {', '.join(entry.questions)}")
            for entry in entries
            for text in dict.fromkeys(entry.texts)
            if entry.questions
        ),
    ]
    return "\n".join(lines) + "\n"


def _item(text: str) -> str:
    return fill(
        f"- {text}",
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def refusals_of(folder: Path = SOURCES) -> dict[str, list[str]]:
    """Return the texts of all refusals. The keys are the names of the source files. A text that
    occurs several times is listed several times. A ``*`` stands for a value in a text.

    The names of files are relative to ``folder``. A text that consists only of values is left out.
    If a refusal has no text, the name of its error code is used.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith("build") or path.suffix not in (".cpp", ".h", ".py"):
            continue
        texts = (_of_python if path.suffix == ".py" else _of_cpp)(path.read_text())
        if kept := [text for text in texts if re.search("[A-Za-z]", text)]:
            found[name] = kept
    return found


def _of_python(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield _one_star("".join(_parts_of(node.exc.args[0])))


def _parts_of(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts_of(value)
    elif isinstance(node, ast.BinOp):
        yield from _parts_of(node.left)
        yield from _parts_of(node.right)
    else:
        yield "*"


def _of_cpp(source: str) -> Iterator[str]:
    source = _COMMENT.sub(lambda match: match[1] or " ", source)
    for match in _CODE.finditer(source):
        yield match[1]
    for match in _CALL.finditer(source):
        arguments = _split(source, match.end(), ",")
        if match[1] in _CONDITIONS:
            arguments = arguments[1:]
        else:
            while arguments and '"' not in arguments[0]:
                del arguments[0]
        is_format = match[1] == "fail" and arguments and "%" in arguments[0]
        text = "".join(map(_text_of, arguments[:1] if is_format else arguments))
        yield _one_star(_CONVERSION.sub("*", text) if is_format else text)


def _split(source: str, begin: int, separator: str) -> list[str]:
    """Split an expression at its separators, and return the parts. The expression begins at
    ``begin``, and ends at the bracket that closes it.
    """
    parts, depth, last, at = [], 0, begin, begin
    while at < len(source):
        if literal := _LITERAL.match(source, at):
            at = literal.end()
            continue
        character = source[at]
        if character in _CLOSE and not depth:
            break
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == separator and not depth:
            parts.append(source[last:at])
            last = at + 1
        at += 1
    return [part.strip() for part in (*parts, source[last:at])]


def _text_of(argument: str) -> str:
    """Return the text that an expression produces: its literals, with ``*`` instead of values."""
    texts = []
    for term in _split(argument, 0, "+"):
        if made := re.fullmatch(r"(?:std::string|text)\s*\((.*)\)", term, re.DOTALL):
            texts += [_text_of(part) for part in _split(made[1], 0, ",")]
        elif not _LITERAL.sub("", term).strip() and term:
            texts += [ast.literal_eval(literal) for literal in _LITERAL.findall(term)]
        else:
            texts.append("*")
    return "".join(texts)


def _one_star(text: str) -> str:
    return re.sub(r"\*[*]+", "*", text).strip()


def main() -> int:
    """Write the page. Print which entries are missing or superfluous. Return the exit status."""
    entries = known_refusals()
    PAGE.write_text(page_of(entries))
    lines = differences(refusals_of(), entries)
    print("\n".join(lines) or f"{PAGE} is written.")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
