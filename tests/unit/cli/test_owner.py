"""The owner of a service goes on when the service's terminal is closed."""

from __future__ import annotations

import os
import pty

from rich.console import Console

from dist_aclgraph.cli.owner import _say


def test_a_closed_terminal_is_no_failure_of_a_service_that_drains() -> None:
    terminal, side = pty.openpty()
    with os.fdopen(side, "w") as file:
        console = Console(file=file)
        os.close(terminal)
        _say(console, "Draining ...")
        _say(console, "Stopped.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), side)  # closing ``file`` writes its buffer here
