"""Laws of the division of cores among ranks. This file also tests how the host's files are read,
and how processes are bound to cores.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device import dcmi, host_cores, kind
from dist_aclgraph.device.host_cores import (
    CORES_OF_AN_NPU,
    addresses_on_host,
    all_cores,
    bind_this_process,
    format_cores,
    parse_cores,
    share_cores,
    shares_here,
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

    assert len(shares) == len(node_of_npu)
    given_out = [core for share in shares for core in share]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= node_of_core.keys()
    assert all(len(share) >= CORES_OF_AN_NPU for share in shares if share)
    assert not given_out or len(given_out) < len(node_of_core)


@given(HOSTS, NPUS)
def test_cores_are_of_the_npus_own_node_where_all_nodes_are_known(
    node_of_core: dict[int, int], node_of_npu: list[int | None]
) -> None:
    for share, node in zip(share_cores(node_of_core, node_of_npu), node_of_npu, strict=True):
        assert None in node_of_npu or {node_of_core[core] for core in share} <= {node}


@given(HOSTS, NPUS)
def test_ranks_are_bound_where_their_node_has_enough_cores(
    node_of_core: dict[int, int], node_of_npu: list[int | None]
) -> None:
    cores, npus = list(node_of_core.values()), node_of_npu
    if None in npus:
        cores, npus = [0] * len(cores), [0] * len(npus)

    assert [bool(share) for share in share_cores(node_of_core, node_of_npu)] == [
        cores.count(n) > CORES_OF_AN_NPU * npus.count(n) for n in npus
    ]


def test_an_a2_with_npus_at_every_second_node() -> None:
    node_of_core = {core: core // 24 for core in range(192)}

    shares = share_cores(node_of_core, [6, 6, 4, 4, 0, 0, 2, 2])

    texts = [format_cores(share) for share in shares]
    assert texts[:2] == ["144-151", "152-159"]  # no rank gets cores 160-167
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
    """A simulated host with two NUMA nodes. Each has 24 cores and two NPUs."""
    pci, numa, tasks = (tmp_path / name for name in ("pci", "node", "task"))
    for node, cores in (("node0", "0-23"), ("node1", "24-47")):
        (numa / node).mkdir(parents=True)
        (numa / node / "cpulist").write_text(f"{cores}\n")
    for address in ADDRESSES:
        (pci / address).mkdir(parents=True)
        (pci / address / "numa_node").write_text(f"{int('c1' in address)}\n")
        (pci / address / "vendor").write_text("0x19e5\n")
        (pci / address / "device").write_text("0xd803\n")
    (pci / "0000:75:00.0").mkdir()
    (pci / "0000:75:00.0" / "vendor").write_text("0x19e5\n")
    (pci / "0000:75:00.0" / "device").write_text("0xa250\n")  # a compression device, not an NPU
    for number in range(len(ADDRESSES)):
        (tmp_path / f"davinci{number}").touch()
    for task in ("7", "8"):
        (tasks / task).mkdir(parents=True)
    monkeypatch.setattr(dcmi, "DCMI", make_library(tmp_path, 0))
    monkeypatch.setattr(kind, "DEV", tmp_path)
    online = tmp_path / "online"
    for name, path in (("ONLINE", online), ("NUMA", numa), ("PCI", pci), ("TASKS", tasks)):
        monkeypatch.setattr(host_cores, name, path)
    set_cores(monkeypatch, online, set(range(48)))
    return tmp_path


def set_cores(monkeypatch: pytest.MonkeyPatch, online: Path, cores: set[int]) -> None:
    """Set the cores of the simulated host to ``cores``. The process may use all these cores."""
    online.write_text(f"{format_cores(frozenset(cores))}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)


def test_the_driver_says_the_addresses_of_all_chips_in_order(host: Path) -> None:
    assert dcmi.pci_addresses() == ADDRESSES
    assert texts_here() == ["24-31", "32-39", "0-7", "8-15"]


def texts_here() -> list[str]:
    return [format_cores(share) for share in shares_here(DeviceConfig())]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text("-1\n")])
def test_an_npu_whose_node_nobody_says_shares_all_cores(
    host: Path, spoil: Callable[[Path], Any]
) -> None:
    spoil(host / "pci" / ADDRESSES[1] / "numa_node")

    assert texts_here() == ["18-26", "27-35", "0-8", "9-17"]


def test_containers_of_one_host_have_different_cores(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = texts_here()
    for number in range(1, len(ADDRESSES)):
        (host / f"davinci{number}").unlink()

    found = []
    for address in ADDRESSES:
        monkeypatch.setattr(host_cores, "pci_addresses", lambda address=address: [address])
        found += texts_here()

    assert found == everything
    assert addresses_on_host(ADDRESSES[:1]) == sorted(ADDRESSES)


def test_an_npu_whose_place_nobody_says_is_not_bound(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host / "davinci0").unlink()
    with pytest.raises(NotBoundError, match="addresses of 4 NPUs, and 3 are here"):
        shares_here(DeviceConfig())
    (host / "davinci0").touch()
    for library in (make_library(host, 3), host / "absent.so"):
        monkeypatch.setattr(dcmi, "DCMI", library)
        with pytest.raises(NotBoundError, match="addresses of 0 NPUs, and 4 are here"):
            shares_here(DeviceConfig())
    for first, reason in (
        ("0000:09:00.0", "does not show the NPU 0000:09"),
        (ADDRESSES[1], "reports 3 different PCI addresses of 4 NPUs"),
    ):
        addresses = [first, *ADDRESSES[1:]]
        monkeypatch.setattr(host_cores, "pci_addresses", lambda addresses=addresses: addresses)
        with pytest.raises(NotBoundError, match=reason):
            shares_here(DeviceConfig())


def test_ranks_with_a_part_of_the_cores_are_not_bound(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(47)))

    with pytest.raises(NotBoundError, match="may use 47 of the host's 48 cores, so its share may"):
        shares_here(DeviceConfig())
    (host / "online").unlink()
    with pytest.raises(NotBoundError, match="does not show the host's cores"):
        shares_here(DeviceConfig())


def test_cores_that_no_numa_node_has_are_of_the_first(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cores(monkeypatch, host / "online", {0, 30, 1000})

    assert all_cores() == {0: 0, 30: 1, 1000: 0}


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
    set_cores(monkeypatch, host / "online", set(range(30)))

    with pytest.raises(NotBoundError, match="30 cores are too few for the host's 4 NPUs: each"):
        shares_here(DeviceConfig())
