"""The command ``npu-emulator`` builds the libraries, and runs programs on the emulated NPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_emulator.building import build, is_built
from npu_emulator.errors import EmulatorError
from npu_emulator.loading import run
from npu_emulator.version import VERSION


def main(prog: str = "npu-emulator", packages: Sequence[Path] = ()) -> None:
    """Build the libraries. If the command is ``run``, then start a program on the emulated NPU.

    Args:
        packages: further folders from which the program can import.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="action")
    commands.add_parser("build", help="only build the libraries, as without a command")
    run_parser = commands.add_parser(
        "run", help="run a program, and its children, on the emulated NPU"
    )
    run_parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the emulator's README.md, for example devices=4",
    )
    run_parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    try:
        build_with_progress()
        if arguments.action == "run":
            settings = dict(setting.partition("=")[::2] for setting in arguments.set)
            run(arguments.command, settings, packages)
    except EmulatorError as e:
        sys.exit(f"error: {e}")


def build_with_progress() -> None:
    """Build the libraries if necessary, and show the progress on stderr.

    Raises:
        BuildError: see ``build``.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if is_built():
        return
    columns = (TextColumn("Building the emulated NPU"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        build(lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what))  # fmt: skip


if __name__ == "__main__":
    main()
