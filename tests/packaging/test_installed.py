"""The installed package works without the repository's clone from which it was built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from dist_aclgraph.device import emulator
from tests.packaging.wheels import make_wheel

LIMIT_S = 200
EXTRAS = ("transformers", "matplotlib", "uvicorn", "pytest")
SOURCES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "dist_aclgraph",
    "benchmarks",
    "tools",
    "configs",
    "models",
    "emulator",
)


@dataclass(frozen=True)
class Installation:
    """A wheel, its unpacked packages, and an empty folder in which commands run."""

    wheel: Path
    packages: Path
    folder: Path
    cache: Path

    def python(self, *arguments: str, **others: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.cache), **others}
        environment["PYTHONPATH"] = str(self.packages)
        environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def command(self, *arguments: str, **others: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "dist_aclgraph.cli.main", *arguments, **others)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("empty")
    packages = tmp_path_factory.mktemp("packages")
    wheel = make_wheel(SOURCES, source, packages)
    return Installation(wheel, packages, folder, tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_types_are_shipped(installation: Installation) -> None:
    assert (installation.packages / "dist_aclgraph" / "py.typed").exists()


def test_nothing_of_tests_benches_and_tools_is_shipped(installation: Installation) -> None:
    names = zipfile.ZipFile(installation.wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"dist_aclgraph"}
    assert not [name for name in names if name.endswith((".o", ".so", ".pyc"))]
    assert "dist_aclgraph/serve/observe/status.html" in names  # the status page


def test_packages_of_plots_benches_and_tests_are_extras(installation: Installation) -> None:
    (metadata,) = installation.packages.glob("*.dist-info/METADATA")
    lines = metadata.read_text().splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist: ")]
    core = " ".join(line for line in required if "extra ==" not in line)

    assert not [name for name in ("transformers", "matplotlib", "openai", "pytest") if name in core]
    assert "Provides-Extra: plots" in lines and "Provides-Extra: bench" in lines


def test_demo_configurations_are_found_from_anywhere(installation: Installation) -> None:
    done = installation.command("plan", "configs/tiny-qwen3.yaml", "--json")

    assert done.returncode == 0, done.stderr
    assert '"buckets"' in done.stdout


@pytest.mark.slow
def test_the_application_of_serve_run_finds_its_default_configuration(
    installation: Installation,
) -> None:
    code = "from dist_aclgraph.serve.app import AppArgs; print(AppArgs().load().model)"
    done = installation.python("-c", code)

    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installation.packages)


def test_a_missing_compiler_is_one_sentence(installation: Installation, tmp_path: Path) -> None:
    done = installation.command(
        "run",
        "configs/tiny-qwen3.yaml",
        "--prompt",
        "Hi",
        "device.kind=emulated",
        PATH=str(tmp_path),
    )

    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "g++ and make must be installed" in line and "apt-get install" in line


def test_a_missing_extra_is_one_sentence(installation: Installation, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else found(name, *a)\n"
        "sys.argv = ['dist-aclgraph', 'plan', 'configs/tiny-qwen3.yaml', '--plot', 'x.png']\n"
        "from dist_aclgraph.cli.main import main; main()"
    )
    done = installation.python("-c", code)

    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: --plot needs matplotlib, which is not installed: pip install 'dist-aclgraph[plots]'"
    )


@pytest.mark.slow
@pytest.mark.cluster
def test_the_demo_model_answers(installation: Installation) -> None:
    code = "from dist_aclgraph.device import emulator; print(emulator.BUILD)"
    folder = Path(installation.python("-c", code).stdout.strip())
    assert folder.is_relative_to(installation.cache)
    # Another build would take half a minute. The existing build has the same sources, so
    # this test copies the existing build.
    shutil.copytree(emulator.build(), folder)

    done = installation.command(
        "run", "configs/tiny-qwen3.yaml", "--prompt", "Count from 3 to 6.", "device.kind=emulated"
    )

    assert done.returncode == 0, done.stderr
    assert "3 4 5 6" in done.stdout
