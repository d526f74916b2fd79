"""``make test-upstream`` runs the tests of a small fake checkout. This file checks the page of
results, and the reported outcomes, hangs and deaths with their causes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.test_upstream import main

TWO = "def test_one(): pass\ndef test_two(): pass\n"
PASSES = TWO + "def test_large(): assert 0\n"
FAILS = """
import os, pytest, unittest
def test_fails(): assert 1 == 2, "one is not two"
def test_dies(): os._exit(3)
def test_after(): pass
@pytest.mark.skip
def test_skipped(): pass
class TestOld(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise ValueError("no device")
    def test_error(self): pass
class TestExpected(unittest.TestCase):
    @unittest.expectedFailure
    def test_expected(self): assert False
"""
HANGS = """
import subprocess, threading
def test_before(): pass
def test_hangs():
    subprocess.Popen(["sleep", "1000"])
    threading.Event().wait()
def test_after(): pass
"""
DATA = """
text = "# Title"
files = ["npu/test_*.py"]
left_out = [{says = "Left out.", names = ["npu/test_left*.py", "npu/test_passes.py::test_large"]}]
cause = [
    {says = "Numbers differ.", tests = ["npu/test_fails.py::test_fails"]},
    {says = "No device here.", needs = "a device", tests = ["npu/test_fails.py::TestOld::*"]},
]
"""


@pytest.fixture
def play(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs test files. The function returns the exit status, the printed
    text, and the page of results.
    """

    def run(*files: str, **sources: str) -> tuple[int, str, str]:
        (tmp_path / "test" / "npu").mkdir(parents=True, exist_ok=True)
        for name, text in sources.items():
            (tmp_path / "test" / "npu" / f"test_{name}.py").write_text(text)
        (tmp_path / "data.toml").write_text(DATA)
        options = [f"--{name}={tmp_path / name}" for name in ("results", "page")]
        options += [f"--data={tmp_path / 'data.toml'}", "--limit=3"]
        status = main([str(tmp_path), *files, *options], command=())
        page = tmp_path / "page"
        return status, capsys.readouterr().out, page.read_text() if page.exists() else ""

    return run


def row(page: str, name: str) -> list[str]:
    """Return the cells of a file's row: passed, failed, error, skipped, hung, not run."""
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


@pytest.mark.slow
def test_a_checkout_that_passes_fails_and_hangs_is_one_table(play) -> None:
    status, printed, page = play(passes=PASSES, fails=FAILS, hangs=HANGS, left="import nothing\n")

    assert row(page, "npu/test_passes.py") == ["2", "", "", "", "", ""]
    assert row(page, "npu/test_fails.py") == ["2", "2", "1", "1", "", ""]
    assert row(page, "npu/test_hangs.py") == ["2", "", "", "", "1", ""]
    assert row(page, "all") == ["6", "2", "1", "1", "1", ""]
    assert "test_left" not in page
    assert "- Numbers differ. (`npu/test_fails.py::test_fails`)" in page
    text = " ".join(page.split())  # without line breaks
    assert "Some of these need what the emulator lacks: a device (1)." in text
    assert "Of the other 9 tests, 66.7 % passed." in text
    assert status == 1
    (died, hung) = printed.split("Without a cause:\n")[1].splitlines()
    assert died == "npu/test_fails.py::test_dies: The process ended with status 3."
    assert hung.startswith("npu/test_hangs.py::test_hangs")


def test_a_new_process_runs_the_tests_after_one_that_stops_the_device(play) -> None:
    source = """
import sys, types
def stop(device=0): raise RuntimeError("the device is stopped")
device = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2)
device.synchronize = lambda device=0: None
sys.modules["torch"] = types.SimpleNamespace(npu=device)
def test_stops():
    device.synchronize = stop
    device.synchronize()
def test_after(): device.synchronize()
"""
    _, _, page = play(a=source)

    assert row(page, "all") == ["1", "1", "", "", "", ""]


@pytest.mark.slow
def test_files_that_are_run_again_replace_their_results_and_keep_the_others(play) -> None:
    status, _, page = play("npu/test_a.py", a="def test(): assert 0\n", b=TWO)
    assert (status, page) == (1, "")  # the page is written only with results of all files

    play("npu/test_b.py")
    status, _, page = play("npu/test_a.py", a=TWO)

    assert status == 0
    assert row(page, "all") == ["4", "", "", "", "", ""]


def test_a_file_that_cannot_be_imported_is_an_error(play) -> None:
    status, printed, page = play(a="import nothing_of_this_name\n")

    assert (status, row(page, "all")) == (1, ["", "", "1", "", "", ""])
    assert "npu/test_a.py: E   ModuleNotFoundError" in printed


def test_an_unknown_file_is_refused(play, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        play("npu/test_b.py", a=PASSES)

    assert "npu/test_b.py" in capsys.readouterr().err
