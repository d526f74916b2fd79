"""The first program of each worker's process, in a Ray that this package has started.

Ray's own first program imports all of Ray, sets a few variables, and replaces itself by the worker,
which imports all of Ray again. To save the first import, this program imports only the standard
library. Ray runs this file by its path.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

THEIRS = "_private/workers/setup_worker.py"
UNKNOWN_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")


def command_of(context: dict[str, Any], arguments: Sequence[str]) -> str | None:
    """Return the shell command that starts a worker; None if only Ray's own program can start it.

    Args:
        context: Ray's ``RuntimeEnvContext``.
    """
    special = ("command_prefix", "override_worker_entrypoint", "java_jars")
    if any(context.get(name) for name in special):
        return None
    executable = context.get("py_executable") or shlex.quote(sys.executable)
    return f"exec {executable} {shlex.join(arguments)}"


def take_over(variables: dict[str, str]) -> None:
    """Set environment variables. A value can contain another variable as ``${OTHER}``."""
    for name, value in variables.items():
        os.environ[name] = UNKNOWN_VARIABLE.sub("", os.path.expandvars(value))


def main() -> None:
    """Replace this program by the worker's program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", dest="context", default="{}")
    parser.add_argument("--language")
    found, arguments = parser.parse_known_args()
    context = json.loads(found.context or "{}")
    command = command_of(context, arguments) if found.language == "PYTHON" else None
    if command is None:
        package = importlib.util.find_spec("ray")
        assert package is not None and package.origin is not None
        theirs = Path(package.origin).parent / THEIRS
        os.execv(sys.executable, [sys.executable, str(theirs), *sys.argv[1:]])
    take_over(context.get("env_vars") or {})
    os.execvp("bash", ["bash", "-c", command])


if __name__ == "__main__":
    main()
