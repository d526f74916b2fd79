"""The wheel ``npu-emulator`` works without the package dist_aclgraph."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator
from tests.packaging.wheels import make_wheel

pytestmark = pytest.mark.slow

SOURCES = [
    f"emulator/{name}"
    for name in (
        *("pyproject.toml", "setup.py", "README.md", "Makefile"),
        *("npu_emulator", "src", "tools", "python"),
    )
]
SCRIPT = """
import sys
import torch
x = torch.arange(6.0, device="npu").view(2, 3)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = x @ x.t() + 1
graph.replay()
import npu_emulator
print("RESULT", y.tolist(), torch.npu.device_count(), npu_emulator.counters()["graphs"])
print("OURS", "dist_aclgraph" in sys.modules)
"""


class Installation:
    """The unpacked wheel, and an empty folder in which programs run."""

    def __init__(self, folder: Path) -> None:
        self.packages, self._cache, source = (folder / name for name in ("p", "c", "s"))
        source.mkdir()
        self.wheel = make_wheel(SOURCES, source, self.packages)
        self._empty = folder / "empty"
        self._empty.mkdir()

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self._cache)}
        environment["PYTHONPATH"] = str(self.packages)
        environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._empty,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_the_sources_and_nothing_that_was_built(installation: Installation) -> None:
    names = zipfile.ZipFile(installation.wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"npu_emulator"}
    assert not [name for name in names if name.endswith((".o", ".so", ".pyc"))]
    assert "npu_emulator/sources/Makefile" in names
    assert "npu_emulator/sources/src/target.h" in names


def test_a_script_that_captures_a_graph_runs_on_it(installation: Installation) -> None:
    found = installation.python("-c", "import npu_emulator; print(npu_emulator.BUILD)")
    # Another build would take half a minute. The existing build has the same sources, so
    # this test copies the existing build.
    folder = Path(found.stdout.strip())
    shutil.copytree(emulator.build(), folder)
    run = ("-m", "npu_emulator.cli", "run", "--set", "devices=3", "--")

    done = installation.python(*run, "python", "-c", textwrap.dedent(SCRIPT))

    assert done.returncode == 0, done.stderr
    assert "RESULT [[6.0, 15.0], [15.0, 51.0]] 3 1" in done.stdout
    assert "OURS False" in done.stdout


def test_an_unknown_setting_is_one_sentence(installation: Installation) -> None:
    done = installation.python("-m", "npu_emulator.cli", "run", "--set", "devises=3", "--", "true")

    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "devises" in line
