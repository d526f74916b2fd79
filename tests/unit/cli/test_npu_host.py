"""The findings of ``doctor`` on hosts with NPUs. Each host has no fault or one fault."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor import npu_host
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.npu_host import (
    MANAGEMENT,
    HostFiles,
    npu_host_findings,
)

NPUS = ["davinci0", "davinci1"]


@pytest.fixture
def host(tmp_path: Path) -> HostFiles:
    """A folder that looks like a host with all files and devices that ``doctor`` checks."""
    files = HostFiles(
        *(tmp_path / name for name in ("dev", "etc", "version.info", "node", "hccn_tool"))
    )
    files.hccn_tool.write_text("#!/bin/sh\necho link status: UP\n")
    files.hccn_tool.chmod(0o755)
    for folder in (files.dev, files.etc, files.numa / "node0", files.numa / "node1"):
        folder.mkdir(parents=True)
    for name in (*NPUS, *MANAGEMENT):
        (files.dev / name).touch()
    files.firmware.write_text("Version=7.8.0.5.216\nfirmware_version=1.0\n")
    (files.etc / "hccn.conf").write_text(
        "address_0=10.1.0.1\nnetmask_0=255.255.255.0\naddress_1=10.1.0.2\n"
    )
    (files.numa / "node0" / "cpulist").write_text("0-1023\n")
    (files.numa / "node1" / "cpulist").write_text("1024-2047\n")
    return files


def look(host: HostFiles) -> dict[str, Finding]:
    return {finding.name: finding for finding in npu_host_findings(NPUS, host)}


def test_a_whole_host_needs_nothing(host: HostFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20)))

    found = look(host)

    assert {finding.mark for finding in found.values()} == {"ok  "}
    assert found["firmware"].found == "7.8.0.5.216"
    assert found["cores"].found == "20 for 2 NPUs: 20 on NUMA node0, 0 on NUMA node1"


def test_a_missing_device_node_is_named_with_the_option_of_the_container(host: HostFiles) -> None:
    (host.dev / "hisi_hdc").unlink()

    finding = look(host)["device nodes"]

    assert (finding.mark, finding.found) == ("FIX ", "missing: hisi_hdc")
    assert "--device=/dev/hisi_hdc" in finding.remedy


def test_a_device_that_the_user_may_not_open_is_named_with_its_group(
    host: HostFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test replaces os.access, because root can open a file whatever its mode is.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "davinci1")

    finding = look(host)["device access"]

    assert (finding.mark, finding.found) == ("FIX ", "this user may not open davinci1")
    assert "HwHiAiUser" in finding.remedy


def test_npus_without_rdma_addresses_are_warned_of(host: HostFiles) -> None:
    conf = host.etc / "hccn.conf"
    conf.write_text("address_0=10.1.0.1\naddress_1=\n")
    assert look(host)["RDMA addresses"].mark == "warn"
    assert look(host)["RDMA addresses"].found == f"{conf} has no address of davinci1"

    conf.unlink()
    assert look(host)["RDMA addresses"].found == f"no {conf}"


def test_few_cores_and_an_unknown_firmware_are_warned_of(
    host: HostFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 1030})
    host.firmware.unlink()

    found = look(host)

    assert (
        found["cores"].mark == "warn"
        and "more than 10 cores, 5 for each NPU" in found["cores"].remedy
    )
    assert found["cores"].found == "3 for 2 NPUs: 2 on NUMA node0, 1 on NUMA node1"
    assert found["firmware"].mark == "warn"


def test_the_cores_of_each_rank_are_shown(host: HostFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [frozenset(range(8)), frozenset(range(8, 16))]
    monkeypatch.setattr(npu_host, "shares_here", lambda config: shares)

    assert look(host)["cores of ranks"].found == "davinci0: 0-7, davinci1: 8-15"


def test_ranks_that_are_not_bound_are_no_fault(host: HostFiles) -> None:
    finding = look(host)["cores of ranks"]

    assert finding.is_ok and finding.found.startswith("ranks are not bound to cores: ")
