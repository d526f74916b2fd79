"""If a process ends without removing its folders, another process removes the folders later."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_aclgraph.actors.controller.serving_groups import ServingGroups
from dist_aclgraph.actors.controller.upkeep import Upkeep
from dist_aclgraph.actors.engine.engine import Engine
from dist_aclgraph.actors.host.liveness import Lease
from dist_aclgraph.actors.host.run_directory import SWEEP_S
from dist_aclgraph.config import load_config
from tests.actors.recovery.test_recovery_model import Groups
from tests.serve.conftest import CONFIG

LEAVE_A_DIRECTORY = """
import os
from dist_aclgraph.actors.host.run_directory import RunDirectory
RunDirectory()
os._exit(0)
"""


def leave_a_directory(folder: Path) -> None:
    environment = {"TMPDIR": str(folder), "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", LEAVE_A_DIRECTORY], env=environment, check=True)


def test_a_deployment_removes_what_a_process_leaves_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    times_s = iter([0.0, SWEEP_S / 2, SWEEP_S])
    groups = cast(ServingGroups, Groups(1, load_config(CONFIG)))
    upkeep = Upkeep(groups, lambda serves: None, lambda: next(times_s))
    upkeep.look()
    leave_a_directory(tmp_path)

    upkeep.look()
    assert len(list(tmp_path.iterdir())) == 1

    upkeep.look()
    assert not list(tmp_path.iterdir())


def test_an_engine_removes_what_the_engine_before_it_leaves_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped engine (SIGSTOP) is replaced. The process ends only later, when it is continued."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = cast(Any, SimpleNamespace(_lease=Lease(1.0), _next_sweep_s=0.0))
    leave_a_directory(tmp_path)

    Engine.ping(engine, 1)
    assert not list(tmp_path.iterdir())

    leave_a_directory(tmp_path)
    Engine.ping(engine, 2)
    assert list(tmp_path.iterdir()), "the next sweep is not due"
