"""The terminal shows the output of Python code, but not the output of native libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from dist_aclgraph.cli.native_output import native_output_in

try:
    with native_output_in(Path(sys.argv[1])):
        os.write(2, b"native\\n")
        print("python", file=sys.stderr)
        raise ValueError
except ValueError:
    os.write(2, b"native again\\n")
    print("the end", file=sys.stderr)
"""


def test_native_code_writes_to_a_file_and_python_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "native.log"
    command = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stderr.splitlines() == ["python", "native again", "the end"]
    assert path.read_text() == "native\n"
