"""``make test-upstream``: run torch_npu's own tests on the emulated NPU, and write a page with the
results.

Each file of tests runs in its own process. If a test hangs, ends the process or stops the device, a
new process runs the remaining tests of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools import upstream_recorder
from tools.upstream_recorder import Results, add, read

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tools" / "upstream.toml"
RESULTS = ROOT / "bench-results" / "upstream"
PAGE = ROOT / "docs" / "develop" / "upstream.md"
SETTINGS = ("devices=2", "wait_s=20", "hccl_s=40")
EMULATOR = (sys.executable, "-m", "dist_aclgraph.device.emulator", "run")
START_S = 300  # time limit in seconds for imports, and for the end of a process
MAX_PROCESSES = 30  # of a file
COLUMNS = ("passed", "failed", "error", "skipped", "hung", "not run")


@dataclass(frozen=True)
class Cause:
    """A cause of failures, as ``upstream.toml`` describes it.

    Attributes:
        needs: what the failing tests need, but the emulator does not have; empty if the cause is a
            defect.
        tests: patterns for the names of the tests that fail for this cause.
    """

    says: str
    tests: tuple[str, ...]
    needs: str = ""

    def explains(self, test: str) -> bool:
        return any(fnmatchcase(test, pattern) for pattern in self.tests)


def run_file(
    command: Sequence[str], tests: Path, name: str, left_out: list[str], out: Path, limit_s: float
) -> Results:
    """Run a file of tests.

    Args:
        command: the beginning of a command line, which starts a program, for example on the
            emulated NPU.
        tests: the folder of the tests. ``name`` is relative to this folder.
        left_out: tests that do not run.
        out: folder to which the record and the output are written.
        limit_s: time limit for each test, in seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{name.replace('/', '.')}.log"
    log.write_text("")
    with log.with_suffix(".txt").open("w") as output:
        for _ in range(MAX_PROCESSES):
            before = read(log)
            process = subprocess.Popen(
                [*command, sys.executable, upstream_recorder.__file__, str(log), name, *left_out],
                cwd=tests, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            is_hung = not ends(process, log, limit_s)
            problem = (
                f"It took longer than {limit_s:g} s."
                if is_hung
                else f"The process ended with status {process.returncode}."
            )
            found = read(log)
            running = [test for test, (outcome, _) in found.items() if outcome == "started"]
            for test in running:
                add(log, "hung" if is_hung else "failed", test, problem)
            if not running and (is_hung or process.returncode not in (0, 1, 2, 5)):
                add(log, "hung" if is_hung else "error", f"{name}::end of the process", problem)
            if found == before or all(outcome != "not run" for outcome, _ in found.values()):
                break
    return read(log)


def ends(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> bool:
    """Wait for the end of a process, and kill the processes that it has started. Return False if
    one of its tests hung.
    """
    seen, since, limit = -1, time.monotonic(), START_S * 1.0
    try:
        while process.poll() is None:
            if log.stat().st_size != seen:
                text = log.read_text()
                seen, since = len(text), time.monotonic()
                is_in_test = text.rpartition("\n")[0].rpartition("\n")[2].startswith('["started"')
                limit = limit_s if is_in_test else max(START_S, limit_s)
            if time.monotonic() - since > limit:
                return False
            time.sleep(0.05)
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def page(files: Mapping[str, Results], data: Mapping[str, Any], sources: str) -> str:
    """Return the page: the total numbers, a table of the files, and the causes of the failures."""
    causes = causes_of(data)
    bad = not_passed(files, causes)
    counts = {name: Counter(o for o, _ in results.values()) for name, results in files.items()}
    total = sum(counts.values(), Counter[str]())
    outside = Counter(cause.needs for cause in bad.values() if cause and cause.needs)
    inside = total.total() - total["skipped"] - outside.total()
    missing = ", ".join(f"{what} ({count})" for what, count in sorted(outside.items()))
    sums = (
        f"{sources} {len(files)} files have {total.total()} tests: {total['passed']} passed, "
        f"{total['skipped']} were skipped by their own conditions, and {len(bad)} did not pass. "
        + (f"Some of these need what the emulator lacks: {missing}. " if missing else "")
        + f"Of the other {inside} tests, {100 * total['passed'] / max(inside, 1):.1f} % passed."
    )
    rows = [f"| file | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, count in {**counts, "all": total}.items():
        rows.append(f"| {name} | " + " | ".join(str(count[c] or "") for c in COLUMNS) + " |")
    left_out = [f"- {entry['says']}" for entry in data["left_out"]]
    blocks = [*data["text"].strip().split("\n\n"), sums, rows, "## Causes"]
    blocks += [list(explained(bad, causes)), "## Not tried", left_out]
    return "\n\n".join(wrap(block) for block in blocks if block) + "\n"


def wrap(block: str | Sequence[str]) -> str:
    """Return a paragraph, or a list of rows or items, in lines of at most 120 characters."""
    if not isinstance(block, str):
        return "\n".join(line if line.startswith("|") else wrap(line) for line in block)
    indent = "  " * block.startswith("- ")
    return textwrap.fill(
        block, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def explained(bad: Mapping[str, Cause | None], causes: Sequence[Cause]) -> Iterator[str]:
    """Yield a Markdown list item for each cause, with the names of the tests that failed for this
    cause.
    """
    for cause in [*causes, None]:
        names = sorted(test.split("::") for test, found in bad.items() if found is cause)
        tests = [f"`{'::'.join((file, *rest[-1:]))}`" for file, *rest in names]  # without classes
        if tests:
            says = cause.says if cause else "The cause is not known."
            yield f"- {says} ({', '.join(tests)})"


def causes_of(data: Mapping[str, Any]) -> list[Cause]:
    return [Cause(c["says"], tuple(c["tests"]), c.get("needs", "")) for c in data["cause"]]


def not_passed(files: Mapping[str, Results], causes: Sequence[Cause]) -> dict[str, Cause | None]:
    """Return the tests that did not pass and were not skipped, with their causes."""
    return {
        test: next((cause for cause in causes if cause.explains(test)), None)
        for results in files.values()
        for test, (outcome, _) in results.items()
        if outcome not in ("passed", "skipped")
    }


def left_out_of(data: Mapping[str, Any]) -> list[str]:
    """Return the patterns of files, and the tests, that do not run."""
    return [name for entry in data["left_out"] for name in entry["names"]]


def names_of(data: Mapping[str, Any], tests: Path) -> list[str]:
    """Return the names of the test files that ``data`` does not leave out."""
    left_out = left_out_of(data)
    found = {str(p.relative_to(tests)) for pattern in data["files"] for p in tests.glob(pattern)}
    return sorted(name for name in found if not any(fnmatchcase(name, p) for p in left_out))


def sources_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    packages = f"torch {version('torch')} and torch_npu {version('torch_npu')}"
    return f"This run used Ascend/pytorch at {commit or 'an unknown commit'}, {packages}."


def main(arguments: Sequence[str], command: Sequence[str] | None = None) -> int:
    """Run the files, write the page, and return the exit status.

    Args:
        command: the beginning of each process's command line. By default, processes run on the
            emulated NPU.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.test_upstream", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a work tree of Ascend/pytorch")
    parser.add_argument("files", nargs="*", help="run only these, and keep the other results")
    parser.add_argument("--limit", type=float, default=120, help="limit for a test, in seconds")
    parser.add_argument("--data", type=Path, default=DATA, help="causes, and files to leave out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    given = parser.parse_args(arguments)
    data = tomllib.loads(given.data.read_text())
    names = names_of(data, tests := given.checkout.resolve() / "test")
    if unknown := sorted(set(given.files) - set(names)) or ([] if names else ["no files of tests"]):
        parser.error(f"not in {tests}, or left out by {given.data}: {' '.join(unknown)}")
    if command is None:
        command = [*EMULATOR, *(word for s in SETTINGS for word in ("--set", s)), "--"]
    stored = given.results / "results.json"
    files: dict[str, Results] = json.loads(stored.read_text()) if stored.exists() else {}
    for name in given.files or names:
        files[name] = run_file(command, tests, name, left_out_of(data), given.results, given.limit)
        stored.write_text(json.dumps(files, indent=1))
        print(name, dict(Counter(outcome for outcome, _ in files[name].values())), flush=True)
    files = {name: files[name] for name in names if name in files}
    if len(files) == len(names):
        given.page.write_text(page(files, data, sources_of(given.checkout)))
    bad = not_passed(files, causes_of(data))
    texts = {test: text for results in files.values() for test, (_, text) in results.items()}
    unexplained = [f"{test}: {texts[test]}" for test, cause in bad.items() if cause is None]
    print("\n".join(["Without a cause:", *unexplained] if unexplained else []))
    return bool(unexplained) or any(o == "hung" for r in files.values() for o, _ in r.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
