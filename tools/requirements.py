"""Prints the packages that pyproject.toml pins; with an argument, those of that extra."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print("\n".join(extras[sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"]))
