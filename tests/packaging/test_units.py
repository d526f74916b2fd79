"""The systemd units in cluster/systemd are checked by systemd's own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "cluster" / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_restarts_for_ever_and_starts_a_program_of_ours(unit: Path) -> None:
    text = unit.read_text()

    assert {
        "Restart=always", "StartLimitIntervalSec=0", "NoNewPrivileges=yes", "LimitCORE=infinity",
    } <= set(text.splitlines())  # fmt: skip
    [program] = re.findall(r"^ExecStart=/opt/dist_aclgraph/(\S+)", text, re.MULTILINE)
    assert program == ".venv/bin/dist-aclgraph" or (ROOT / program).stat().st_mode & 0o100


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(tmp_path: Path, unit: Path) -> None:
    for other in UNITS:
        # The programs that the units start are not installed on this machine.
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", other.read_text(), flags=re.M)
        (tmp_path / other.name).write_text(text.replace("User=dist-aclgraph", "User=root"))

    ended = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (ended.returncode, ended.stderr) == (0, "")
