"""On a machine with NPUs, commands make plans, and refuse bad settings before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dist_aclgraph.cli.checks import check_deployment
from dist_aclgraph.cli.main import cli
from dist_aclgraph.config import load_config
from dist_aclgraph.device import kind

CONFIGS = Path(__file__).parents[3] / "configs"
LARGE = str(CONFIGS / "qwen3-235b-a22b-tp8-dp2-ep16.yaml")
TINY = str(CONFIGS / "tiny-qwen3.yaml")
DEEPSEEK = str(CONFIGS / "tiny-deepseek.yaml")


@pytest.fixture(autouse=True)
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev. It contains the device files of eight NPUs."""
    monkeypatch.setattr(kind, "DEV", tmp_path)
    for number in range(8):
        (tmp_path / f"davinci{number}").touch()
    return tmp_path


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_auto_plans_with_the_memory_of_npus() -> None:
    planned = plan(LARGE, "device.kind=auto")

    assert planned.exit_code == 0, planned.output
    assert "an Ascend910B with 60.96 GiB under CANN 9.1.0" in planned.output
    assert "no NPU was" in planned.output


def test_a_plan_uses_what_is_given_of_the_npus() -> None:
    given = ("device.soc=Ascend910_9391", "device.cann=8.5.1", "device.memory_mb=62433")

    planned = plan(LARGE, "device.kind=auto", *given)

    assert planned.exit_code == 0, planned.output
    assert "an Ascend910_9391 with 60.97 GiB under CANN 8.5.1" in planned.output
    assert "no NPU was" not in planned.output


def test_a_machine_without_npus_plans_with_the_emulators(dev: Path) -> None:
    for path in dev.iterdir():
        path.unlink()

    refused = plan(LARGE, "device.kind=auto")

    assert refused.exit_code == 2
    assert "which has 4.00; weights" in refused.output


def test_a_cluster_whose_nodes_decide_is_not_refused_for_the_heads_devices(
    dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in dev.iterdir():
        path.unlink()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    overrides = {"device.kind": "auto", "weights": "dummy"}

    assert check_deployment(load_config(LARGE, overrides)).device.kind == "auto"


def test_a_plan_has_the_stricter_rules_of_an_npu_whose_cann_is_unknown() -> None:
    latent = ("parallel.tp=2", "parallel.dcp=2", "device.soc=Ascend910B1", "device.memory_mb=62433")

    refused = plan(DEEPSEEK, *latent, "device.kind=npu", "device.cann=''")
    accepted = plan(DEEPSEEK, *latent, "device.kind=npu", "device.cann=8.5.1")

    assert refused.exit_code == 2 and "latent attention gives no sums" in refused.output
    assert accepted.exit_code == 0, accepted.output
