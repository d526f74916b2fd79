"""The findings of ``doctor`` on a machine without NPUs, such as the head of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor.examine import (
    compiler_finding,
    device_finding,
    hixl_finding,
    machine_findings,
)

NPUS = ["davinci0", "davinci1"]


def test_a_head_without_npus_and_without_an_emulator_is_warned_and_not_refused() -> None:
    finding = device_finding([], is_emulator_built=False)

    assert (finding.is_ok, finding.mark) == (True, "warn")
    assert "no NPU here" in finding.found and "head of a cluster" in finding.found
    assert "dist_aclgraph.device.emulator" in finding.remedy


@pytest.mark.parametrize(("npus", "is_built"), [(NPUS, False), (NPUS, True), ([], True)])
def test_a_device_of_either_kind_is_fine(npus: list[str], is_built: bool) -> None:
    assert device_finding(npus, is_emulator_built=is_built).mark == "ok  "


def test_an_npu_needs_a_cann_with_hixl_if_the_transport_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {finding.name for finding in machine_findings()}
    [found] = [each for each in machine_findings(uses_hixl=True) if each.name not in names]
    assert found.name == "kv.transport=hixl" and found.is_ok and "emulated" in found.found
    # Another test of this process may have loaded the emulator, whose folder also contains this
    # package.
    monkeypatch.delitem(sys.modules, "hixl", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "hixl").exists()])
    missing = hixl_finding(["davinci0"])
    assert not missing.is_ok and "set kv.transport to sockets" in missing.remedy
    (tmp_path / "hixl.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    there = hixl_finding(["davinci0"])
    assert there.is_ok and str(tmp_path) in there.found


def test_a_compiler_is_missed_only_where_an_emulator_may_have_to_be_built() -> None:
    missing = ["g++", "make"]

    warned = compiler_finding([], missing, is_emulator_built=False)

    assert (warned.is_ok, warned.mark) == (True, "warn")
    assert warned.found.startswith("no g++ and no make") and "apt-get install" in warned.remedy
    assert compiler_finding(NPUS, missing, is_emulator_built=False).mark == "ok  "
    assert compiler_finding([], missing, is_emulator_built=True).mark == "ok  "
    assert compiler_finding([], [], is_emulator_built=False).mark == "ok  "
