"""The table of torch_npu's release series, the extras to install them, and the report of their
tests.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dist_aclgraph.device.versions import DEFAULT, LINES, installed_line, installed_name
from tools.test_versions import SETS, all_lines, count_outcomes

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_each_line_has_an_extra_with_its_torch_and_no_other_extra_has_one() -> None:
    installs = {name: pins for name, pins in EXTRAS.items() if name.startswith("npu-")}

    assert installs == {
        f"npu-{name}": [f"torch=={line.torch}", f"torch-npu=={line.torch_npu}"]
        for name, line in LINES.items()
    }


def test_make_tests_each_line() -> None:
    assert all_lines() == list(LINES)


def test_each_set_of_tests_names_files_that_exist() -> None:
    paths = {a.partition("::")[0] for set_ in SETS.values() for a in set_ if a[0] != "-"}

    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_make_installs_the_default_line() -> None:
    assert f"NPU ?= {DEFAULT}\n" in (ROOT / "Makefile").read_text()


def test_requirements_of_a_line_have_its_pair_beside_the_other_packages() -> None:
    command = [sys.executable, ROOT / "tools" / "requirements.py", "npu-2.12"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert [pin for pin in printed if pin.startswith("torch")] == [
        "torch-npu==2.12.0",
        "torch==2.12.0",
    ]
    assert any(pin.startswith("ray") for pin in printed)


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.10.0+cpu", "2.10"), ("2.12.0", "2.12"), ("2.13.0+cpu", "2.13"), ("2.11.0", DEFAULT)],
)
def test_the_installed_torch_tells_the_line(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)

    assert installed_name() == name
    assert installed_line() is LINES[name]


def test_without_torch_the_line_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)

    assert installed_name() == DEFAULT


def test_a_report_counts_each_test_once_by_its_outcome(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase/><testcase/><testcase><failure/><error/></testcase>"
        "<testcase><skipped/></testcase><testcase><system-out/></testcase></testsuite></testsuites>"
    )

    assert count_outcomes(report) == {"passed": 3, "failed": 1, "skipped": 1}
    assert count_outcomes(tmp_path / "none.xml") == {"failed": 1}
