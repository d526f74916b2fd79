"""If CANN is installed but cannot be loaded, one sentence says so before any process is started."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from dist_aclgraph import environment
from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.cli.checks import check_deployment
from dist_aclgraph.cli.doctor.examine import cann_libraries_finding
from dist_aclgraph.cli.main import cli
from dist_aclgraph.config import load_config
from dist_aclgraph.device import kind
from dist_aclgraph.device.cann import load_problem, load_remedy
from dist_aclgraph.device.npu import load_torch_npu
from dist_aclgraph.errors import DeviceError

TINY = str(Path(__file__).parents[3] / "configs" / "tiny-qwen3.yaml")
LAYOUTS = ("cann", "ascend-toolkit")


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of CANN on a simulated machine with an NPU. No set_env.sh was sourced."""
    monkeypatch.setattr(kind, "DEV", tmp_path)
    (tmp_path / "davinci0").touch()
    monkeypatch.setenv("ASCEND_INSTALL_PATH", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests can have started Ray
    return tmp_path


def install(ascend: Path, layout: str) -> Path:
    script = ascend / layout / "set_env.sh"
    script.parent.mkdir()
    script.touch()
    return script


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_script_that_exists_is_named(ascend: Path, layout: str) -> None:
    script = install(ascend, layout)

    assert f"source {script} in this shell" in load_remedy("libhccl.so: cannot open")


def test_of_both_layouts_the_newer_one_is_named(ascend: Path) -> None:
    scripts = {layout: install(ascend, layout) for layout in LAYOUTS}

    assert str(scripts["cann"]) in load_remedy("libhccl.so: cannot open")


def test_the_cann_of_a_user_who_is_not_root_is_second(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, home = ascend / "local" / "Ascend", ascend / "home" / "Ascend"
    for folder in (root, home):
        folder.mkdir(parents=True)
    monkeypatch.delenv("ASCEND_INSTALL_PATH")
    monkeypatch.setenv("HOME", str(ascend / "home"))
    monkeypatch.setattr(environment, "ASCEND", root)

    scripts = [install(home, "ascend-toolkit")]
    assert environment.cann_scripts() == scripts
    scripts.insert(0, install(root, "cann"))
    assert environment.cann_scripts() == scripts
    monkeypatch.setenv("ASCEND_INSTALL_PATH", str(ascend))
    assert environment.cann_scripts() == []


def test_a_script_that_was_sourced_or_does_not_exist_is_not_named(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_remedy("libhccl.so: cannot open").startswith("install CANN")
    script = install(ascend, "cann")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(ascend / "cann"))
    assert str(script) not in load_remedy("libhccl.so: cannot open")
    assert "driver" in load_remedy("libascend_hal.so: cannot open shared object file")


def test_doctor_wants_it_fixed(ascend: Path) -> None:
    script = install(ascend, "cann")

    finding = cann_libraries_finding()

    assert finding.mark == "FIX "
    assert finding.found.startswith("libascendcl.so: cannot open shared object file")
    assert f"source {script}" in finding.remedy


@pytest.mark.parametrize("command", [["serve"], ["run", "--prompt", "hello"]])
def test_a_command_that_starts_something_says_it_first(
    ascend: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(ascend, "cann")
    monkeypatch.setattr(deployment, "start_ray", None)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    refused = CliRunner().invoke(cli, [*command, TINY, f"serve.port={port}"])

    assert refused.exit_code == 1
    assert refused.output.count("\n") == 1
    assert refused.output.startswith("error: CANN cannot be loaded (libascendcl.so: cannot open")
    assert f"source {script} in this shell" in refused.output


def test_a_deployment_that_is_started_by_hand_says_it_too(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "start_ray", None)

    with pytest.raises(DeviceError, match="CANN cannot be loaded"):
        deployment.start(load_config(TINY))


def test_a_head_of_a_cluster_needs_no_cann(ascend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")

    assert check_deployment(load_config(TINY, {"dtype": "bfloat16"})).device.kind == "npu"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libhccl.so: cannot open shared object file"), "libhccl.so: cannot open"),
        (Exception("no opp package\n[ERROR] 2026 ERR00008 PTA"), r"CANN .* \(no opp package\)"),
    ],
)
def test_loading_torch_npu_without_it_is_an_error_of_ours(
    ascend: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    script, load = install(ascend, "cann"), builtins.__import__

    def refuse(name: str, *arguments: Any, **keys: Any) -> Any:
        if name == "torch_npu":
            raise error
        return load(name, *arguments, **keys)

    monkeypatch.setattr(builtins, "__import__", refuse)

    with pytest.raises(DeviceError, match=rf"{said}.*source {script}"):
        load_torch_npu("npu")


def test_a_sourced_cann_without_what_torch_npu_wants_is_named(
    ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ascend / "cann"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    assert load_problem() == f"{home} is missing (ASCEND_HOME_PATH)"

    install(ascend, "cann")
    assert load_problem() == "ASCEND_OPP_PATH is not set"
    assert "operators of your chip" in load_remedy(load_problem())

    monkeypatch.setenv("ASCEND_OPP_PATH", str(home / "opp"))
    assert load_problem() == f"{home}/opp is missing (ASCEND_OPP_PATH)"

    (home / "opp").mkdir()
    assert load_problem() == f"{home}/runtime is missing"

    for part in ("runtime", "compiler"):
        (home / part).mkdir()
    assert load_problem().startswith("libascendcl.so: cannot open")
