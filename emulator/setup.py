"""Puts the C++ sources into the wheel; pyproject.toml has all other settings."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ("src", "tools", "python")


class BuildWithSources(build_py):
    """Copies the folders and the Makefile that a build at the first use needs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "npu_emulator" / "sources"
            for name in SOURCES:
                shutil.copytree(
                    ROOT / name,
                    target / name,
                    ignore=shutil.ignore_patterns("__pycache__"),
                    dirs_exist_ok=True,
                )
            shutil.copy(ROOT / "Makefile", target / "Makefile")


setup(cmdclass={"build_py": BuildWithSources})
