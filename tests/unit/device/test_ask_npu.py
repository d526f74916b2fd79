"""A child process reads an NPU's properties. The tests check how the parent process interprets the
child's reply and exit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.device.ask import NpuFacts, ask_npu
from dist_aclgraph.errors import DeviceError
from tests.actors.leftovers import is_alive, wait_until

CONFIG = make_config({"model": "m"})


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replace the child process by a shell script."""

    def answer_by(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return answer_by


def test_the_last_line_is_the_answer(child) -> None:
    child(
        'echo "[INFO] a library says something"\n'
        'echo \'{"soc": "Ascend910B3", "cann": "9.1.0", "memory_mb": 62433}\''
    )

    assert ask_npu(CONFIG) == NpuFacts("Ascend910B3", "9.1.0", 62433)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo \'{"error": "opening the device: 507008"}\'', "opening the device: 507008"),
        ("echo noise; echo 'drv error' >&2; exit 3", "drv error"),
        ("kill -9 $$", "ended with -9"),
    ],
)
def test_a_child_that_fails_is_one_sentence(child, script: str, said: str) -> None:
    child(script)

    with pytest.raises(DeviceError, match=f"first NPU .* cannot be asked: .*{said}"):
        ask_npu(CONFIG)


def test_a_child_that_hangs_is_killed_in_time(child, tmp_path: Path) -> None:
    child(f"echo $$ > {tmp_path}/pid; exec sleep 600")

    with pytest.raises(DeviceError, match=r"has not answered for 2 s.*npu-smi"):
        ask_npu(CONFIG, 2.0)

    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), "the child is there still")
