"""Prints the packages that pyproject.toml pins, and the packages of the extras whose names are
given as arguments.

If ``--only`` comes before the names, only the packages of these extras are printed.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def pins(packages: list[str]) -> set[str]:
    """Return the pinned requirements. An extra of this project is replaced by the packages of the
    extra.
    """
    found = set()
    for package in packages:
        own = re.fullmatch(rf"{project['name']}\[([\w.-]+)\]", package)
        found |= pins(project["optional-dependencies"][own[1]]) if own else {package}
    return found


names = sys.argv[1:]
base = [] if names[:1] == ["--only"] else project["dependencies"]
extras = [f"{project['name']}[{name}]" for name in names if name != "--only"]
print("\n".join(sorted(pins(base + extras))))
