"""Cores of each rank: laws of the shares, the reading of the host's files, and the binding."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device import dcmi, host_cores, kind
from dist_aclgraph.device.host_cores import (
    CORES_OF_AN_NPU,
    bind_this_process,
    format_cores,
    nodes_of_npus,
    parse_cores,
    share_cores,
    shares_here,
    usable_cores,
)
from dist_aclgraph.errors import NotBoundError

NODES = st.integers(0, 3)
HOSTS = st.dictionaries(st.integers(0, 255), NODES, max_size=200)
NPUS = st.lists(st.none() | NODES, min_size=1, max_size=16)

# Two cards of an A3, with two chips each.
LIBRARY = """
struct info { unsigned ids[4]; int domain; unsigned bus, device, function; char rest[32]; };
int dcmi_init(void) { return RESULT; }
int dcmi_get_card_num_list(int *count, int *cards, int length) {
  *count = 2, cards[0] = 0, cards[1] = 1;
  return 0;
}
int dcmi_get_device_id_in_card(int card, int *chips, int *controller, int *cpu) {
  *chips = 2;
  return 0;
}
int dcmi_get_device_pcie_info_v2(int card, int chip, struct info *info) {
  info->domain = 0, info->bus = card ? 1 : 0xc1, info->device = chip, info->function = 0;
  return 0;
}
"""
ADDRESSES = ["0000:c1:00.0", "0000:c1:01.0", "0000:01:00.0", "0000:01:01.0"]


@given(HOSTS, NPUS)
def test_shares_are_disjoint_of_equal_use_and_leave_a_core_to_other_processes(
    node_of_core: dict[int, int], node_of_npu: list[int | None]
) -> None:
    shares = share_cores(node_of_core, node_of_npu)

    assert len(shares) in (0, len(node_of_npu))
    given_out = [core for share in shares for core in share]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= node_of_core.keys()
    assert all(len(share) >= CORES_OF_AN_NPU for share in shares)
    assert not shares or len(given_out) < len(node_of_core)


@given(HOSTS, NPUS)
def test_cores_are_of_the_npus_own_node_where_all_nodes_are_known(
    node_of_core: dict[int, int], node_of_npu: list[int | None]
) -> None:
    is_known = set(node_of_npu) <= set(node_of_core.values())

    for share, node in zip(share_cores(node_of_core, node_of_npu), node_of_npu, strict=False):
        assert not is_known or {node_of_core[core] for core in share} == {node}


@given(HOSTS, NPUS)
def test_ranks_are_bound_where_each_node_has_enough_cores(
    node_of_core: dict[int, int], node_of_npu: list[int | None]
) -> None:
    cores, npus = list(node_of_core.values()), node_of_npu
    if not set(npus) <= set(cores):
        cores, npus = [0] * len(cores), [0] * len(npus)
    is_enough = all(cores.count(n) > CORES_OF_AN_NPU * npus.count(n) for n in set(npus))

    assert bool(share_cores(node_of_core, node_of_npu)) == is_enough


def test_an_a2_with_npus_at_every_second_node() -> None:
    node_of_core = {core: core // 24 for core in range(192)}

    shares = share_cores(node_of_core, [6, 6, 4, 4, 0, 0, 2, 2])

    texts = [format_cores(share) for share in shares]
    assert texts[:2] == ["144-151", "152-159"]  # cores 160-167 stay free
    assert texts[2:] == ["96-103", "104-111", "0-7", "8-15", "48-55", "56-63"]


def test_npus_of_unknown_nodes_share_all_cores() -> None:
    shares = share_cores({core: core // 10 for core in range(20)}, [None, 1])

    assert [format_cores(share) for share in shares] == ["0-5", "6-11"]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())]
)
def test_lists_of_cores_are_those_of_the_kernel(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores
    assert format_cores(frozenset(cores)) == text.strip()


def make_library(folder: Path, result: int) -> Path:
    source, library = folder / "dcmi.c", folder / f"libdcmi{result}.so"
    source.write_text(LIBRARY)
    command = ["g++", "-x", "c", "-shared", "-fPIC", f"-DRESULT={result}", source, "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with four NPUs, two at each of two NUMA nodes of 24 cores."""
    pci, numa, tasks = (tmp_path / name for name in ("pci", "node", "task"))
    for node, cores in (("node0", "0-23"), ("node1", "24-47")):
        (numa / node).mkdir(parents=True)
        (numa / node / "cpulist").write_text(f"{cores}\n")
    for address in ADDRESSES:
        (pci / address).mkdir(parents=True)
        (pci / address / "numa_node").write_text(f"{int('c1' in address)}\n")
    for number in range(len(ADDRESSES)):
        (tmp_path / f"davinci{number}").touch()
    for task in ("7", "8"):
        (tasks / task).mkdir(parents=True)
    monkeypatch.setattr(dcmi, "DCMI", make_library(tmp_path, 0))
    monkeypatch.setattr(kind, "DEV", tmp_path)
    for name, folder in (("NUMA", numa), ("PCI", pci), ("TASKS", tasks)):
        monkeypatch.setattr(host_cores, name, folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(48)))
    return tmp_path


def test_the_driver_says_the_addresses_of_all_chips_in_order(host: Path) -> None:
    assert dcmi.pci_addresses() == ADDRESSES
    assert nodes_of_npus(4) == [1, 1, 0, 0]


def test_an_npu_whose_node_nobody_says_is_unknown(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "pci" / ADDRESSES[0] / "numa_node").write_text("-1\n")
    (host / "pci" / ADDRESSES[1] / "numa_node").unlink()
    assert nodes_of_npus(4) == [None, None, 0, 0]
    assert nodes_of_npus(2) == [None, None]  # a container without all NPUs of its host

    monkeypatch.setattr(dcmi, "DCMI", make_library(host, 3))
    assert nodes_of_npus(4) == [None] * 4
    monkeypatch.setattr(dcmi, "DCMI", host / "absent.so")
    assert nodes_of_npus(4) == [None] * 4


def test_cores_outside_the_container_are_not_used(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 30, 1000})

    assert usable_cores() == {0: 0, 30: 1, 1000: 0}


def test_all_threads_of_a_rank_are_bound_to_the_cores_of_its_npu(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: dict[int, str] = {}
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda task, cores: bound.update({task: format_cores(cores)})
    )
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")

    assert format_cores(bind_this_process(DeviceConfig())) == "8-15"
    assert bound == {7: "8-15", 8: "8-15"}


@pytest.mark.parametrize(
    ("visible", "affinity", "keys", "reason"),
    [
        ("0", "0", {"bind_cores": "off"}, "device.bind_cores is off"),
        ("0", "2,npu_affine:1", {}, "CPU_AFFINITY_CONF is set"),
        ("4", "0", {}, "ASCEND_RT_VISIBLE_DEVICES names none of 4 NPUs"),
        ("0,1", "0", {}, "ASCEND_RT_VISIBLE_DEVICES names none of 4 NPUs"),
        ("0", "0", {}, "the kernel refuses it"),
    ],
)
def test_a_rank_that_cannot_be_bound_says_why(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    affinity: str,
    keys: dict[str, str],
    reason: str,
) -> None:
    def refuse(task: int, cores: frozenset[int]) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CPU_AFFINITY_CONF", affinity)

    with pytest.raises(NotBoundError, match=reason):
        bind_this_process(DeviceConfig.model_validate(keys))


def test_a_host_with_few_cores_binds_nobody(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(30)))

    with pytest.raises(NotBoundError, match="30 cores are too few for 4 NPUs: each needs 5"):
        shares_here(DeviceConfig())
