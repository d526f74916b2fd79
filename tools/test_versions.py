"""``make test-versions``: run tests with each release series of torch_npu. These are the tests of
the emulator, of graphs and of a rank's work, some parity tests, and all questions of the probe,
which the emulator answers.

Each series has its own virtual environment (.venv-2.12 for 2.12) and its own build of the emulator.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The arguments for pytest for each set of tests. Each set runs in its own process, because a
# process cannot change the settings of its emulator.
SETS: dict[str, tuple[str, ...]] = {
    "emulator": ("tests/emulator",),
    "graphs": ("tests/graphs",),
    "engine": ("tests/engine",),
    "parity": (
        "tests/parity/models/test_chips.py",
        "tests/parity/models/test_int4.py",
        "tests/parity/models/test_int8.py",
        "tests/parity/models/test_sparse_latent.py",
        "tests/parity/layouts/test_spread_experts.py",
    ),
    # For each operator that the runtime uses, the probe compares the results of the device with the
    # results of the host.
    "probe": (
        "tests/probe/test_devices.py::test_the_emulator_answers_as_it_says",
        "--hypothesis-profile=full",
        "-m=slow",
    ),
}
SETUP_S, TESTS_S = 3600, 1800
OUTCOMES = ("passed", "failed", "skipped")


def all_lines() -> list[str]:
    """Return the series of torch_npu for which pyproject.toml has an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [name.removeprefix("npu-") for name in extras if name.startswith("npu-")]


def set_up(line: str, environment: Path) -> str:
    """Create the virtual environment of a series, and build the emulator for it. Return a text that
    describes the problem; "" if there is none.
    """
    command = ["make", "-s", "setup-dev", "emulator", f"NPU={line}", f"VENV={environment.name}"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, timeout=SETUP_S, stderr=subprocess.PIPE, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no environment within {SETUP_S} s"
    lines = done.stderr.strip().splitlines() or ["no environment"]
    return "" if done.returncode == 0 else lines[-1]


def run_tests(environment: Path, arguments: Sequence[str]) -> dict[str, int]:
    """Run tests, and return the number of tests with each outcome.

    Args:
        arguments: arguments for pytest. If they contain no ``-m``, slow tests are left out.

    Raises:
        TimeoutExpired: the tests take longer than ``TESTS_S``.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(environment / "bin/python"), "-m", "pytest", "-q", "-m=not slow", *arguments]
        subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=ROOT,
            timeout=TESTS_S,
            check=False,
        )
        return count_outcomes(report)


def count_outcomes(report: Path) -> dict[str, int]:
    """Return the number of tests with each outcome. If the report is missing, this counts as one
    failure.
    """
    if not report.exists():
        return {"failed": 1}
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    cases = ElementTree.parse(report).getroot().iter("testcase")
    outcomes = ({kinds[child.tag] for child in case if child.tag in kinds} for case in cases)
    return Counter(min(found, default="passed") for found in outcomes)


def main(lines: Sequence[str]) -> int:
    """Test each series, print a table, and return the exit status."""
    rows, is_good = [], True
    for line in lines or all_lines():
        environment = ROOT / f".venv-{line}"
        if problem := set_up(line, environment):
            rows.append(f"{line:6}  not tried: {problem}")
            is_good = False
            continue
        for name, arguments in SETS.items():
            try:
                counts = run_tests(environment, arguments)
            except subprocess.TimeoutExpired:
                counts = {"failed": 1}
            is_good &= not counts.get("failed")
            numbers = "".join(f"{counts.get(outcome, 0):9}" for outcome in OUTCOMES)
            rows.append(f"{line:6}  {name:9}{numbers}")
    print(f"\n{'line':6}  {'tests':9}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES))
    print("\n".join(rows))
    return not is_good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
