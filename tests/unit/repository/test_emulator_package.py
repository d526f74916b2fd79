"""The environment in which ``npu_emulator`` compiles, and the modules that it imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator
from npu_emulator.environment import build_environment


def test_a_compiler_runs_without_the_flags_of_a_make_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-j2")
    monkeypatch.setenv("CXX", "g++")

    environment = build_environment()

    assert "MAKEFLAGS" not in environment and environment["CXX"] == "g++"


def test_the_package_imports_nothing_of_the_runtime() -> None:
    files = sorted(Path(emulator.SOURCES, "npu_emulator").glob("*.py"))

    assert len(files) > 5
    assert not [f.name for f in files if re.search(r"(?:import|from) dist_aclgraph", f.read_text())]
