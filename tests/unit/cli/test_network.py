"""The findings of ``doctor`` about HCCL's environment variables on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor import network
from dist_aclgraph.cli.doctor.network import network_problem, overridden_warning, port_warning
from dist_aclgraph.config import make_config
from dist_aclgraph.environment import CONFIGURED_HCCL, child_environment

INTERFACES = ["lo", "eth0", "docker0"]


def test_an_address_of_this_machine_is_fine() -> None:
    assert network_problem({"HCCL_IF_IP": "127.0.0.1"}, INTERFACES) == ""


@pytest.mark.parametrize("address", ["203.0.113.7", "eth0"])
def test_an_address_of_another_machine_is_found(address: str) -> None:
    problem = network_problem({"HCCL_IF_IP": address}, INTERFACES)

    assert problem == f"HCCL_IF_IP is {address}, which is no address of this machine"


@pytest.mark.parametrize("asked", ["eth", "eth0", "=eth0", "enp,eth", "^docker", "^=eth0,docker0"])
def test_interfaces_that_are_here_are_fine(asked: str) -> None:
    assert network_problem({"HCCL_SOCKET_IFNAME": asked}, INTERFACES) == ""


@pytest.mark.parametrize("asked", ["bond", "=eth", "^lo,eth,docker", "^=lo,eth0,docker0"])
def test_interfaces_that_are_not_here_are_found(asked: str) -> None:
    problem = network_problem({"GLOO_SOCKET_IFNAME": asked}, INTERFACES)

    assert problem == f"GLOO_SOCKET_IFNAME is {asked}, which none of lo, eth0, docker0 matches"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    (tmp_path / "reserved").write_text("50000-50010\n")
    monkeypatch.setattr(network, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(network, "RESERVED", tmp_path / "reserved")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("ports", ["auto", "50000-50010", "20000-20100,50005"])
def test_ports_that_the_kernel_gives_no_other_process_need_no_warning(ports: str) -> None:
    assert port_warning({"HCCL_HOST_SOCKET_PORT_RANGE": ports}) == ""


@pytest.mark.usefixtures("kernel")
def test_ports_that_the_kernel_gives_away_are_warned_of() -> None:
    warning = port_warning({"HCCL_NPU_SOCKET_PORT_RANGE": "50005-50011"})

    assert "HCCL_NPU_SOCKET_PORT_RANGE" in warning
    assert "(32768-60999), such as 50011" in warning


@pytest.mark.parametrize(
    "ports",
    ["60000-x", "x", "60010-60000", "60000-70000", "0-10", "60000-", "60000-60001-2", "1 2"],
)
def test_ports_that_are_none_are_found_with_what_they_may_be(ports: str) -> None:
    problem = network_problem({"HCCL_HOST_SOCKET_PORT_RANGE": ports}, INTERFACES)

    assert problem.startswith(f"HCCL_HOST_SOCKET_PORT_RANGE is {ports}, ")
    assert "FIRST-LAST" in problem and "1 to 65535" in problem
    assert port_warning({"HCCL_HOST_SOCKET_PORT_RANGE": ports}) == ""


@pytest.mark.parametrize("ports", ["auto", "60000-60050", "60000-60010, 60020", "60000"])
def test_ports_as_hccl_takes_them_are_fine(ports: str) -> None:
    assert network_problem({"HCCL_NPU_SOCKET_PORT_RANGE": ports}, INTERFACES) == ""


def test_variables_that_the_configuration_goes_before_are_warned_of() -> None:
    own = {"HCCL_IF_IP": "10.0.0.9", "HCCL_BUFFSIZE": "64", "HCCL_EXEC_TIMEOUT": "9"}

    warning = overridden_warning(own)

    assert warning == (
        "HCCL_BUFFSIZE=64 (device.hccl_buffer_mb), HCCL_EXEC_TIMEOUT=9 (timeouts.step_s) of this "
        "environment reach no worker: the configuration goes first, as plans count with it"
    )
    assert overridden_warning({"HCCL_IF_IP": "10.0.0.9"}) == ""


def test_doctor_checks_the_hccl_variables_that_every_worker_gets() -> None:
    given = child_environment(make_config({"model": "m"}))

    # HCCL_BUFFSIZE is left out. MC2's group reads its buffer size from the environment variable.
    # Every other group gets its buffer size as an option.
    always = set(CONFIGURED_HCCL) - {"HCCL_BUFFSIZE"}
    assert always == {name for name in given if name.startswith("HCCL_")}
