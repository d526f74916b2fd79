"""Puts the C++ sources into the wheel. All other settings are in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCES = ("src", "tools", "python")


class BuildWithSources(build_py):
    """Also copies the folders and the Makefile with which the libraries are built at their first
    use.
    """

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
