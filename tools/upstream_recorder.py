"""A plugin for pytest that records the start and the outcome of each test in a file.

``make test-upstream`` runs this script for each file of tests, several times if a test hangs or
ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

# If a test has several outcomes, the outcome that is last in this list counts.
OUTCOMES = ("not run", "started", "passed", "skipped", "failed", "error", "hung")

Results = dict[str, tuple[str, str]]  # name of a test -> outcome, error text of the test


class Recorder:
    """A plugin for pytest that adds a line to ``log`` when a test starts, and for each report about
    a test.

    Two kinds of tests do not run: tests in ``left_out``, and tests that have already started
    according to ``log``. If a test stops the device, no later test of this process runs, because
    all of them would fail.
    """

    def __init__(self, log: Path, left_out: Collection[str]):
        self._log = log
        self._left_out = left_out
        self._session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        known = read(self._log)
        done = {test for test, (outcome, _) in known.items() if outcome != "not run"}
        waiting = [i for i in items if i.nodeid not in done and i.nodeid not in self._left_out]
        # torch_npu runs its tests in the order of unittest, and some tests depend on this order.
        items[:] = sorted(waiting, key=lambda item: str(item.nodeid))
        for item in items:
            add(self._log, "not run", item.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            add(self._log, "error", report.nodeid, message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        add(self._log, "started", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        is_expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
        outcome = "passed" if is_expected else report.outcome
        if report.when == "call" or outcome != "passed":
            is_error = report.when != "call" and outcome == "failed"
            add(self._log, "error" if is_error else outcome, report.nodeid, message(report))
        if outcome == "failed" and is_device_stopped():
            self._session.shouldstop = "the device is stopped"


def is_device_stopped() -> bool:
    npu = getattr(sys.modules.get("torch"), "npu", None)
    try:
        if npu is not None and npu.is_initialized():
            for device in range(npu.device_count()):
                npu.synchronize(device)
    except RuntimeError:
        return True
    return False


def message(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr or "").strip().splitlines()
    return " ".join(lines if crash else lines[-1:])[:400]


def add(log: Path, outcome: str, test: str, text: str = "") -> None:
    with log.open("a") as file:
        file.write(json.dumps([outcome, test, text]) + "\n")


def read(log: Path) -> Results:
    """Return the outcome and the text of each test."""
    results: Results = {}
    for line in log.read_text().splitlines():
        outcome, test, text = json.loads(line)
        known = results.get(test, ("not run", ""))
        if OUTCOMES.index(outcome) >= OUTCOMES.index(known[0]):
            results[test] = (outcome, text or known[1])
    return results


def record(log: Path, name: str, left_out: list[str]) -> int:
    import pytest

    options = ["-q", "-c", os.devnull, "--rootdir=.", "-p", "no:cacheprovider"]
    options.append("--disable-plugin-autoload")
    return int(pytest.main([*options, name], plugins=[Recorder(log, left_out)]))


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
