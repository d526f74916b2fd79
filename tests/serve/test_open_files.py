"""If few files may be open, a warning says how many connections can outlive their process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.slow import slow

SCRIPT = """
import resource, sys
from dist_aclgraph.cli.serve import _allow_connections
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
_allow_connections(1000)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "soft", "said"),
    [
        slow(4096, 2512, ""),  # two descriptors per connection, and 512 others
        (2000, 2000, "only 488 of 1000 connections outlive"),
        slow(1200, 1200, "only 0 of 1000 connections outlive"),
    ],
)
def test_who_may_open_few_files_is_told_what_is_not_kept(hard: int, soft: int, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hard)], capture_output=True, text=True, timeout=60
    )

    assert run.stdout == f"{soft}\n", run.stderr
    assert said in run.stderr if said else "outlive" not in run.stderr
