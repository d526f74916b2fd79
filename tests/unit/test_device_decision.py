"""Which device a deployment is planned for: decided once, before anything is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.device import decision, kind
from dist_aclgraph.device.decision import decide_device
from dist_aclgraph.device.kind import emulator_settings
from dist_aclgraph.errors import DeviceError
from dist_aclgraph.planning.chip import Chip


def make(**device: Any) -> Config:
    return make_config({"model": "m", "device": device})


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which NPUs are looked for; no NPU is in it."""
    monkeypatch.setattr(kind, "DEV", tmp_path)
    monkeypatch.setattr(decision, "check_cann", lambda: None)
    return tmp_path


def test_auto_is_the_npu_of_this_machine_else_the_emulator(dev: Path) -> None:
    assert decide_device(make(), "here").device.kind == "emulated"
    (dev / "davinci_manager").touch()
    assert decide_device(make(), "here").device.kind == "emulated"
    (dev / "davinci7").touch()
    assert decide_device(make(), "here").device.kind == "npu"


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
    assert decide_device(make(), "cluster").device.kind == "npu"


@pytest.mark.parametrize("device_kind", ["auto", "npu", "emulated"])
def test_the_chip_that_is_given_goes_before_the_kind(device_kind: str) -> None:
    config = make(kind=device_kind, soc="Ascend910_9391")

    assert config.device.chip == "Ascend910_9391"
    assert config.device.expansion == "AICPU"
    assert emulator_settings(config.device, 0)["soc"] == "Ascend910_9391"
    Chip("Ascend910_9391", "9.1.0").check_assumed(config, "the NPU of rank 0")
