"""Builds wheels as pip does, from copies of the files in the repository's clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 200
NOT_COPIED = shutil.ignore_patterns("build", "build-*", "__pycache__")


def make_wheel(names: Iterable[str], folder: Path, packages: Path) -> Path:
    """Copy files and folders of the clone to ``folder``, build a wheel there, and return its path.

    The wheel is also unpacked into ``packages``.
    """
    for name in names:
        if (ROOT / name).is_dir():
            target = folder / Path(name).name
            shutil.copytree(ROOT / name, target, ignore=NOT_COPIED, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "."],
        cwd=folder,
        check=True,
        timeout=LIMIT_S,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return wheel
