"""The kind of device of a deployment is decided once, before the deployment is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.config.device import UNKNOWN_CANN
from dist_aclgraph.device import decision, kind
from dist_aclgraph.device.ask import NpuFacts
from dist_aclgraph.device.decision import Use, decide_device
from dist_aclgraph.device.kind import emulator_settings
from dist_aclgraph.errors import DeviceError
from dist_aclgraph.planning.chip import Chip

A3 = NpuFacts("Ascend910_9391", "8.5.1", 62_433)
KEYS = ("soc", "cann", "memory_mb")


def say_a3(config: Config) -> NpuFacts:
    return A3


def fail(config: Config) -> NpuFacts:
    raise DeviceError("507008")


def make(**device: Any) -> Config:
    return make_config({"model": "m", "device": device})


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev. It contains no device file of an NPU."""
    monkeypatch.setattr(kind, "DEV", tmp_path)
    monkeypatch.setattr(decision, "check_cann", lambda: None)
    return tmp_path


def test_auto_is_the_npu_of_this_machine_else_the_emulator(dev: Path) -> None:
    assert decide_device(make(), "here", say_a3).device.kind == "emulated"
    (dev / "davinci_manager").touch()
    assert decide_device(make(), "here", say_a3).device.kind == "emulated"
    (dev / "davinci7").touch()
    assert decide_device(make(), "here", say_a3).device.kind == "npu"


def test_a_kind_that_is_given_stays(dev: Path) -> None:
    assert decide_device(make(kind="npu"), "plan").device.kind == "npu"
    (dev / "davinci0").touch()
    assert decide_device(make(kind="emulated"), "here").device.kind == "emulated"


def test_ranks_that_start_here_need_the_npu_that_is_asked_for(dev: Path) -> None:
    with pytest.raises(DeviceError, match="no /dev/davinci"):
        decide_device(make(kind="npu"), "here")


def test_the_head_of_a_cluster_leaves_auto_to_the_other_nodes(dev: Path) -> None:
    assert decide_device(make(), "cluster").device.kind == "auto"
    assert decide_device(make(kind="npu"), "cluster").device.kind == "npu"
    (dev / "davinci0").touch()
    assert decide_device(make(), "cluster", say_a3).device.kind == "npu"


@pytest.mark.parametrize("device_kind", ["auto", "npu", "emulated"])
def test_the_chip_that_is_given_goes_before_the_kind(device_kind: str) -> None:
    config = make(kind=device_kind, soc="Ascend910_9391")

    assert config.device.chip == "Ascend910_9391"
    assert config.device.expansion == "AICPU"
    assert emulator_settings(config.device, 0)["soc"] == "Ascend910_9391"
    Chip("Ascend910_9391", "9.1.0").check_assumed(config, "the NPU of rank 0")


@pytest.mark.parametrize(
    ("chip", "memory_bytes"),
    [
        ("Ascend910B1", 65_452_113_920),
        ("Ascend910B3", 65_452_113_920),
        ("Ascend910B4", 30_208 << 20),
        ("Ascend910B4-1", 65_452_113_920),
        ("Ascend910_9391", 65_452_113_920),
    ],
)
def test_plans_assume_the_memory_that_torch_reports_on_a_chip(chip: str, memory_bytes: int) -> None:
    assert make(kind="npu", soc=chip).device.npu_bytes == memory_bytes
    assert make(kind="npu", soc=chip, memory_mb=1000).device.npu_bytes == 1000 << 20


@pytest.mark.parametrize(
    ("count", "given", "assumed"), [(2, None, 8), (16, None, 16), (16, 4, 4), (0, None, 8)]
)
def test_plans_assume_a_usual_node_or_this_one_if_it_has_more_npus(
    dev: Path, count: int, given: int | None, assumed: int
) -> None:
    for number in range(count):
        (dev / f"davinci{number}").touch()
    facts = NpuFacts("Ascend910B1", "9.1.0", 62_433)

    config = decide_device(make(kind="npu", node_npus=given), "plan", lambda _: facts)

    assert config.device.npus_of_node == assumed


def known(config: Config) -> NpuFacts:
    return NpuFacts(*(getattr(config.device, key) for key in KEYS))


def test_a_cann_that_the_npu_does_not_report_has_the_rules_of_a_start(dev: Path) -> None:
    (dev / "davinci0").touch()
    silent = NpuFacts("Ascend910B1", "", 62_433)

    device = decide_device(make(), "plan", lambda _: silent).device

    assert device.unknown == ()
    assert Chip(device.chip, device.npu_cann) == Chip(silent.soc, silent.cann)
    assert device.assumed.endswith(f"under CANN {UNKNOWN_CANN}")
    assert make(cann="").device.npu_cann == ""


@pytest.mark.parametrize("use", ["plan", "here", "cluster"])
def test_plans_use_the_facts_of_this_machines_npu(dev: Path, use: Use) -> None:
    (dev / "davinci0").touch()

    assert known(decide_device(make(), use, say_a3)) == A3


def test_the_device_is_not_asked_for_configured_facts(dev: Path) -> None:
    (dev / "davinci0").touch()
    config = make(memory_mb=32_000)

    assert known(decide_device(config, "here", say_a3)).memory_mb == 32_000
    all_given = decide_device(make(soc="Ascend910B3", cann="9.1.0", memory_mb=1000), "here", fail)
    assert known(all_given) == NpuFacts("Ascend910B3", "9.1.0", 1000)
    assert decide_device(all_given, "here", fail) == all_given


def test_without_npus_nobody_is_asked(dev: Path) -> None:
    assert decide_device(make(kind="npu"), "plan", fail).device.unknown == KEYS
    assert decide_device(make(), "here", fail).device.unknown == KEYS


def test_an_npu_that_does_not_answer_stops_a_start_and_no_plan(
    dev: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (dev / "davinci0").touch()

    with pytest.raises(DeviceError, match="507008"):
        decide_device(make(), "here", fail)
    planned = decide_device(make(soc="Ascend910B4"), "plan", fail)

    assert planned.device.npu_bytes == 30_208 << 20
    (line,) = caplog.messages
    assert line == (
        "no NPU was asked, and plans assume that each NPU is an Ascend910B4 with 29.5 GiB under "
        "CANN 9.1.0: 507008"
    )
