"""``make chaos`` injects faults into a service on several hosts, and leaves no process and no file
behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.several_nodes import ROOT
from tools.namespaces import why_no_nodes

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(why_no_nodes() is not None, reason=str(why_no_nodes())),
    pytest.mark.timeout(1200),
]

COMMAND = [sys.executable, "-u", "-m", "tools.chaos", "--nodes=3", "--seed=1"]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder for all temporary files. The folder's name is short, because sockets are
    created in it, and a socket's path must not be long.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kill_host", "host of a group killed, started again"),
        ("kill_gcs", "control store of Ray killed"),
    ],
)
def test_a_fault_of_hosts_is_carried_out_and_told_in_a_table(
    temporary: Path, npu: object, kind: str, name: str
) -> None:
    rig = subprocess.run(
        [*COMMAND, "--faults=1", f"--only={kind}"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=1000,
    )

    assert rig.returncode == 0, rig.stdout + rig.stderr
    assert f"| {name} | 1 | 16 | 0 | 0 | 0 |" in rig.stdout
    assert list(temporary.iterdir()) == []
