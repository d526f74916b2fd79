from __future__ import annotations

import fcntl
import itertools
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.controller.state import (
    TRANSITIONS,
    IllegalTransitionError,
    State,
    advance,
)
from dist_aclgraph.actors.host.run_directory import RunDirectory, sweep

WAY = (
    State.PLACING, State.JOINING, State.LOADING, State.NEGOTIATING, State.CAPTURING,
    State.SERVING, State.DRAINING, State.STOPPED,
)  # fmt: skip


def test_the_way_of_a_deployment_is_allowed() -> None:
    for current, following in itertools.pairwise(WAY):
        assert advance(current, following) is following


def test_a_deployment_without_a_group_recovers_or_ends() -> None:
    assert advance(State.SERVING, State.RECOVERING) is State.RECOVERING
    assert advance(State.RECOVERING, State.SERVING) is State.SERVING
    with pytest.raises(IllegalTransitionError):
        advance(State.PLACING, State.RECOVERING)


def test_a_deployment_without_graphs_goes_from_negotiation_to_serving() -> None:
    assert advance(State.NEGOTIATING, State.SERVING) is State.SERVING


@pytest.mark.parametrize("state", [s for s in State if s is not State.STOPPED])
def test_an_error_may_stop_every_state(state: State) -> None:
    assert advance(state, State.STOPPED) is State.STOPPED


@pytest.mark.parametrize("state", list(State))
def test_nothing_leads_out_of_stopped(state: State) -> None:
    with pytest.raises(IllegalTransitionError, match="STOPPED"):
        advance(State.STOPPED, state)


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


def test_serving_before_loading_is_refused() -> None:
    with pytest.raises(IllegalTransitionError, match="PLACING to SERVING"):
        advance(State.PLACING, State.SERVING)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_run_directory_is_private(temporary: Path) -> None:
    directory = RunDirectory()

    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    directory.remove()


def test_directories_of_dead_owners_are_swept(temporary: Path) -> None:
    make = "from dist_aclgraph.actors.host.run_directory import RunDirectory as R; print(R().path)"
    dead = subprocess.run(
        [sys.executable, "-c", make],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert Path(dead).is_dir()

    RunDirectory().remove()

    assert not Path(dead).exists()


def test_directories_of_living_owners_stay_whatever_their_process_ids(temporary: Path) -> None:
    # The names of directories contain no process id, because in another container the same id can
    # belong to another process.
    mine = RunDirectory()
    foreign = temporary / "dist-aclgraph-notes"
    foreign.mkdir()

    RunDirectory().remove()

    assert Path(mine.path).exists()
    assert foreign.exists()
    mine.remove()


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock", "os.rename"])
def test_a_directory_whose_owner_dies_while_it_is_made_is_swept(temporary: Path, call: str) -> None:
    code = (
        "import fcntl, os, tempfile\n"
        "from dist_aclgraph.actors.host.run_directory import RunDirectory\n"
        "tempfile.gettempdir()\n"
        f"{call} = lambda *arguments, **keys: os._exit(9)\n"
        "RunDirectory()"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    died = subprocess.run([sys.executable, "-c", code], env=environment)
    assert died.returncode == 9 and list(temporary.iterdir())

    sweep()

    assert not list(temporary.iterdir())


def test_a_directory_whose_owner_dies_while_it_is_removed_is_swept(temporary: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from dist_aclgraph.actors.host.run_directory import RunDirectory\n"
        "directory = RunDirectory()\n"
        "pathlib.Path(directory.path, 'steps').touch()\n"
        "os.rmdir = lambda *arguments, **keys: os._exit(9)\n"
        "directory.remove()"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    died = subprocess.run([sys.executable, "-c", code], env=environment)
    assert died.returncode == 9 and list(temporary.iterdir())

    sweep()

    assert not list(temporary.iterdir())


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock"), (os, "rename")])
def test_a_directory_that_is_made_while_others_sweep_belongs_to_its_owner(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    call: Callable[..., Any] = getattr(module, name)

    def swept_before(*arguments: Any, **keys: Any) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        sweep()
        return call(*arguments, **keys)

    monkeypatch.setattr(module, name, swept_before)
    directory = RunDirectory()
    sweep()

    assert list(temporary.iterdir()) == [Path(directory.path)]
    directory.remove()
    assert not list(temporary.iterdir())


def test_removing_a_run_directory_twice_is_fine(temporary: Path) -> None:
    directory = RunDirectory()

    directory.remove()
    directory.remove()

    assert not Path(directory.path).exists()
