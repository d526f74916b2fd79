"""With a torch that is built for CUDA, torch_npu would end the process. Our error is raised before
that can happen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUDA = "from typing import Optional\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
REMEDY = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
LOADS = {
    "emulator": "from dist_aclgraph.device import emulator; emulator.load({})",
    "npu": (
        "from dist_aclgraph.config import DeviceConfig\n"
        "from dist_aclgraph.device import npu; npu.open_npu(DeviceConfig(kind='emulated'), 0)"
    ),
    "driver": (
        "from dist_aclgraph.actors.deployment import deployment\n"
        "from dist_aclgraph.config import load_config\n"
        "deployment.start(load_config('configs/tiny-qwen3.yaml'))"
    ),
}


def run(code: str, folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run code with a fake torch. The file ``version.py`` of this torch contains ``version``. The
    import of this torch prints a line.
    """
    torch = folder / "torch"
    torch.mkdir()
    (torch / "version.py").write_text(version)
    (torch / "__init__.py").write_text(
        "print('imported')\nclass Tensor: ...\nclass dtype: ...\nclass device: ...\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "RAY_ADDRESS": "127.0.0.1:1"},
    )  # fmt: skip


@pytest.mark.parametrize("where", LOADS)
def test_a_torch_for_cuda_is_refused_with_a_remedy(where: str, tmp_path: Path) -> None:
    found = run(LOADS[where], tmp_path, CUDA)

    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("dist_aclgraph.errors.DeviceError: the installed torch is built for")
    assert "CUDA 13.0" in last
    assert last.endswith(REMEDY)


def test_the_doctor_names_it(tmp_path: Path) -> None:
    code = "from dist_aclgraph.cli.doctor.examine import examine; print(*examine(), sep='\\n')"

    found = run(code, tmp_path, CUDA)

    (line,) = [line for line in found.stdout.splitlines() if "name='torch build'" in line]
    assert "is_ok=False" in line and "CUDA 13.0" in line and REMEDY in line
    assert "imported" not in found.stdout


def test_a_torch_for_cpus_passes(tmp_path: Path) -> None:
    code = "from dist_aclgraph.device.emulator import check_torch; check_torch()"

    found = run(code, tmp_path, CPU)

    assert (found.returncode, found.stdout) == (0, ""), found.stderr
