"""Rules for container images: after a change of our sources, packages are not downloaded again; and
nothing runs as root.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ("Dockerfile.emulated", "Dockerfile.ascend")
ALL = "."  # argument of COPY for all files
DOWNLOADS = re.compile(r"apt-get install|pip install")


def read_image(name: str) -> str:
    return (ROOT / "cluster" / name).read_text()


def instructions_of(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments of each instruction of an image, in order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def copied(rest: str) -> list[str]:
    """Return the source paths of a COPY instruction."""
    *sources, _ = [word for word in rest.split() if not word.startswith("--")]
    return sources


def before_packages(text: str) -> list[str]:
    """Return the files that are copied before the last download of packages."""
    instructions = instructions_of(text)
    last = max(i for i, (name, rest) in enumerate(instructions) if DOWNLOADS.search(rest))
    return [path for name, rest in instructions[:last] if name == "COPY" for path in copied(rest)]


def faults_of(text: str) -> set[str]:
    """Return the violations of the rules about the order of layers, and about the image's user."""
    instructions = instructions_of(text)
    faults = set()
    if ALL in before_packages(text):
        faults.add("sources come before packages")
    users = [rest for name, rest in instructions if name == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        faults.add("the service runs as root")
    names = [name for name, _ in instructions]
    if "USER" in names and "COPY" in names[: names.index("USER")]:
        faults.add("files are copied as root")
    owners = {re.match(r"--chown=(\S+)", rest) for name, rest in instructions if name == "COPY"}
    if None in owners or {owner[1] for owner in owners if owner} != set(users):
        faults.add("files belong to another user")
    return faults


@pytest.mark.parametrize("name", IMAGES)
def test_a_change_of_the_sources_rebuilds_no_packages_and_nothing_runs_as_root(name: str) -> None:
    assert faults_of(read_image(name)) == set()


@pytest.mark.parametrize("name", IMAGES)
def test_packages_are_chosen_from_the_files_that_are_copied_before(
    name: str, tmp_path: Path
) -> None:
    text = read_image(name)
    for path in before_packages(text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    found = re.search(r"tools/requirements.py npu-(\S+)", text)
    assert found is not None
    wheel = re.sub(r"\$\{NPU\}", "2.12", found[1])

    command = [sys.executable, "-S", "tools/requirements.py", f"npu-{wheel}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert re.search(r"^torch-npu==", done.stdout, re.M)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (
            lambda text: text.replace("COPY", f"COPY --chown=X {ALL} {ALL}\nCOPY", 1),
            "sources come before packages",
        ),
        (lambda text: re.sub(r"^USER .*\n", "", text, flags=re.M), "the service runs as root"),
        (lambda text: f"{text}USER root\n", "the service runs as root"),
        (lambda text: f"{text}USER 0:0\n", "the service runs as root"),
        (
            lambda text: re.sub(r"^USER", "COPY models models\nUSER", text, flags=re.M),
            "files are copied as root",
        ),
        (
            lambda text: text.replace(f" {ALL} {ALL}\n", f" {ALL} {ALL}\nCOPY docs docs\n"),
            "files belong to another user",
        ),
    ],
)
def test_an_image_that_would_rebuild_packages_or_run_as_root_is_found(
    name: str, spoil: Callable[[str], str], fault: str
) -> None:
    spoilt = spoil(read_image(name))

    assert spoilt != read_image(name)
    assert fault in faults_of(spoilt)
