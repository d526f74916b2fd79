"""The scripts that start Ray on a node call ``ray`` with the right arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[2] / "cluster"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a copy of the scripts, no CANN, and a fake ``ray`` that prints its
    arguments.
    """
    shutil.copytree(CLUSTER, tmp_path / "cluster")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "ray").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" "CANN=${CANN_IS-}"\n')
    (programs / "ray").chmod(0o755)
    return tmp_path


def run(
    root: Path, script: str, *arguments: str, **others: str
) -> subprocess.CompletedProcess[str]:
    variables = {"RAY_AUTH_TOKEN": "t", "ASCEND_INSTALL_PATH": str(root / "Ascend"), **others}
    return subprocess.run(
        [root / "cluster" / script, *arguments],
        env=os.environ | variables, text=True, capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head", "address"),
    [
        ("10.0.0.1", "10.0.0.1:6379"),
        ("10.0.0.1:7000", "10.0.0.1:7000"),
        ("head.example", "head.example:6379"),
        ("fd00::1", "[fd00::1]:6379"),
        ("[fd00::1]", "[fd00::1]:6379"),
        ("[fd00::1]:7000", "[fd00::1]:7000"),
    ],
)
def test_a_worker_joins_the_head_whatever_its_address_looks_like(
    root: Path, head: str, address: str
) -> None:
    done = run(root, "start-worker.sh", head, "--block")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == ["start", "--address", address, "--block"]


@pytest.mark.parametrize("script", ["start-head.sh", "start-worker.sh"])
@pytest.mark.parametrize(
    "cann", ["cann/set_env.sh", "ascend-toolkit/set_env.sh", "nnal/atb/set_env.sh"]
)
def test_a_script_of_cann_that_ends_badly_stops_nothing(root: Path, script: str, cann: str) -> None:
    path = root / "Ascend" / cann
    path.parent.mkdir(parents=True)
    path.write_text('export CANN_IS="here$NO_SUCH_VARIABLE$#"\nfalse\nreturn 1\n')

    done = run(root, script, "10.0.0.1")

    assert done.returncode == 0, done.stderr
    assert "CANN=here0" in done.stdout.splitlines()
    assert done.stderr.count("\n") == 1 and cann in done.stderr


@pytest.mark.parametrize(
    ("sourced", "wanted"), [("", "CANN=cann"), ("/opt/another", "CANN=/opt/another")]
)
def test_the_newest_cann_is_read_unless_one_is_set_up_already(
    root: Path, sourced: str, wanted: str
) -> None:
    for folder in ("ascend-toolkit", "cann"):
        path = root / "Ascend" / folder / "set_env.sh"
        path.parent.mkdir(parents=True)
        path.write_text(f'export CANN_IS="${{CANN_IS-}}{folder}"\n')

    done = run(root, "start-head.sh", ASCEND_HOME_PATH=sourced, CANN_IS=sourced)

    assert wanted in done.stdout.splitlines()


def test_our_own_mistakes_still_end_a_script_after_that(root: Path) -> None:
    (root / "Ascend" / "ascend-toolkit").mkdir(parents=True)
    (root / "Ascend" / "ascend-toolkit" / "set_env.sh").write_text("true\n")
    with (root / "cluster" / "environment.sh").open("a") as file:
        file.write('false\necho "went on" >&2\n')

    done = run(root, "start-head.sh")

    assert done.returncode == 1
    assert "went on" not in done.stderr
