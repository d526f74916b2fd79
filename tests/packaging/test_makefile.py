"""The Makefile's test targets print which tests they leave out, and use the right settings."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> str:
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return str(found)


def test_the_rehearsal_of_a_cluster_sends_as_much_junk_as_it_says() -> None:
    assert "DIST_ACLGRAPH_JUNK=$(JUNK)" in recipe("test-cluster")
    assert "\nJUNK ?= 100000\n" in MAKEFILE


def test_make_prints_which_tests_were_left_out() -> None:
    assert '-m "not slow and not bench and not namespaces"' in recipe("test")
    *_, emulator, others, _ = recipe("test-more").splitlines()
    assert '-m "slow and not rare" tests/emulator' in emulator
    assert '-m "slow and not rare and not bench and not namespaces"' in others
    for target in ("test", "test-more"):
        assert "make test-cluster" in recipe(target).splitlines()[-1]


def test_all_tests_of_make_test_and_make_test_more_are_spread_over_processes() -> None:
    lines = [*recipe("test").splitlines(), *recipe("test-more").splitlines()]

    found = [line for line in lines if ("-m " in line and "tests" in line) or "$(OTHERS)" in line]

    assert len(found) == 4
    assert all("$(SPREAD)" in line or "$(OTHERS)" in line for line in found)


def test_programs_keep_the_bytecode_of_their_imports_whatever_the_environment_says() -> None:
    show = ["--eval", "show: ; @env"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["make", "-s", "-C", str(ROOT), *show, "show"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_the_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """xdist runs tests in one process if their names end with ``@`` and the same group name."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests run in this process")
    file = request.node.nodeid.partition("::")[0]
    assert request.node.nodeid.endswith(f"@{file}")
