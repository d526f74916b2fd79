"""Puts into the package what a clone has beside it; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = ("configs", "models/tiny-qwen3", "models/tiny-deepseek", "models/tiny-agent", "emulator")
# The emulator's pyproject.toml belongs to its own wheel, npu-emulator.
LEFT_OUT = shutil.ignore_patterns(
    "build", "build-*", "__pycache__", ".*", "*.egg-info", "pyproject.toml", "setup.py"
)


class BuildWithFiles(build_py):
    """Copies configurations, demo models and the emulator's sources into a wheel."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                target = Path(self.build_lib) / "dist_aclgraph" / "shipped" / name
                shutil.copytree(ROOT / name, target, ignore=LEFT_OUT, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFiles})
