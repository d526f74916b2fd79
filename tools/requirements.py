"""Prints the packages that pyproject.toml pins; with arguments, those of these extras too."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def pins(packages: list[str]) -> set[str]:
    """Replace extras of this project itself by their packages."""
    found = set()
    for package in packages:
        own = re.fullmatch(rf"{project['name']}\[([\w.-]+)\]", package)
        found |= pins(project["optional-dependencies"][own[1]]) if own else {package}
    return found


extras = [f"{project['name']}[{extra}]" for extra in sys.argv[1:]]
print("\n".join(sorted(pins(project["dependencies"] + extras))))
