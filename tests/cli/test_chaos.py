"""``make chaos`` injects faults into a service, and leaves no process and no file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_aclgraph.actors.host import processes
from tests.actors.leftovers import wait_until
from tests.slow import rare

pytestmark = [pytest.mark.cluster]

ROOT = Path(__file__).parents[2]
WAIT_S = 600.0
COMMAND = [sys.executable, "-u", "-m", "tools.chaos", "--seed=1", "--only=kill_worker"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder for all temporary files. The folder's name is short, because sockets are
    created in it, and a socket's path must not be long.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def start(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def started_in(folder: Path) -> list[int]:
    """Return the processes whose folder for temporary files is ``folder``."""
    found = [processes.with_variable("TMPDIR", str(path)) for path in folder.glob("chaos-*/s-*")]
    return sorted(set().union(*found))


@pytest.mark.slow
def test_a_fault_is_carried_out_and_told_in_a_table(temporary: Path, npu: object) -> None:
    rig = start(temporary, "--faults=1")
    said, _ = rig.communicate(timeout=WAIT_S)

    assert rig.returncode == 0, said
    assert "1: worker killed, after" in said
    assert "| worker killed | 1 | 8 | 0 | 0 | 0 |" in said
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, rare(signal.SIGINT)])
def test_a_rig_that_is_stopped_leaves_no_process_and_no_file(
    temporary: Path, npu: object, heard_signals: None, number: signal.Signals
) -> None:
    rig = start(temporary, "--faults=3")
    try:
        wait_until(lambda: len(started_in(temporary)) > 5, "no service is started", WAIT_S)
        pids = started_in(temporary)

        rig.send_signal(number)

        said, _ = rig.communicate(timeout=WAIT_S)
        assert rig.returncode not in (0, -number), said
        assert not set(pids) & processes.living()
        assert list(temporary.iterdir()) == []
    finally:
        rig.kill()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--only=kill_workers"], "there is no fault 'kill_workers'; there are: kill_worker, "),
        (["--only=kill_host"], "kill_host needs several hosts: give --nodes 3\n"),
        (["--only=kill_spare", "--nodes=2"], "kill_spare needs a host without a group: --nodes 3 "),
        (["--nodes=1"], "--nodes 1 are too few: the shape needs 2"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_one_sentence(
    temporary: Path, options: list[str], wanted: str
) -> None:
    rig = start(temporary, *options)
    said, _ = rig.communicate(timeout=WAIT_S)

    assert rig.returncode == 1
    assert said.startswith(f"error: {wanted}") and said.count("\n") == 1
