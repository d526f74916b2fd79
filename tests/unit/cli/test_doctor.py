"""Tests of doctor's findings on a machine without NPUs, such as the head of a cluster."""

from __future__ import annotations

import pytest

from dist_aclgraph.cli.doctor.examine import compiler_finding, device_finding

NPUS = ["davinci0", "davinci1"]


def test_a_head_without_npus_and_without_an_emulator_is_warned_and_not_refused() -> None:
    finding = device_finding([], is_emulator_built=False)

    assert (finding.is_ok, finding.mark) == (True, "warn")
    assert "no NPU here" in finding.found and "head of a cluster" in finding.found
    assert "dist_aclgraph.device.emulator" in finding.remedy


@pytest.mark.parametrize(("npus", "is_built"), [(NPUS, False), (NPUS, True), ([], True)])
def test_a_device_of_either_kind_is_fine(npus: list[str], is_built: bool) -> None:
    assert device_finding(npus, is_emulator_built=is_built).mark == "ok  "


def test_a_compiler_is_missed_only_where_an_emulator_may_have_to_be_built() -> None:
    missing = ["g++", "make"]

    warned = compiler_finding([], missing, is_emulator_built=False)

    assert (warned.is_ok, warned.mark) == (True, "warn")
    assert warned.found.startswith("no g++ and no make") and "apt-get install" in warned.remedy
    assert compiler_finding(NPUS, missing, is_emulator_built=False).mark == "ok  "
    assert compiler_finding([], missing, is_emulator_built=True).mark == "ok  "
    assert compiler_finding([], [], is_emulator_built=False).mark == "ok  "
