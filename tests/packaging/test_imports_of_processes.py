"""Processes import only what they need. An unnecessary import costs seconds of CPU time in each
process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "torch_npu", "transformers", "sympy", "scipy", "pandas", "matplotlib"}
WITHOUT_TORCH = (
    "actors.worker.rank_stages",
    "actors.worker.worker",
    "actors.engine.engine",
    "actors.client.engine_client",
    "actors.controller.startup",
    "actors.controller.controller",
    "actors.deployment.deployment",
    "serve.app",
    "cli.serve",
    "cli.probe",
)


def imported_by(code: str) -> set[str]:
    """Run ``code`` in a new process; return the names of the modules that are then loaded."""
    show = "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, check=True)
    return set(done.stdout.decode().split())


def test_processes_that_compute_nothing_import_no_torch() -> None:
    """Actors and services compute nothing, so they must not import torch. The modules that Ray
    imports before it sets a rank's environment must not import torch, either.
    """
    code = f"""
import importlib, sys
for name in {WITHOUT_TORCH}:
    importlib.import_module(f"dist_aclgraph.{{name}}")
    if found := {HEAVY} & set(sys.modules):
        sys.exit(f"{{name}} imports {{found}}")
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_imports_neither_torch_nor_ray() -> None:
    assert not imported_by("import dist_aclgraph, dist_aclgraph.cli.main") & (HEAVY | {"ray"})


def test_recording_operators_does_not_load_the_compiler() -> None:
    """If the recording of operators loaded the compiler, the first capture of each rank would be
    slow.
    """
    code = (
        "import torch\n"
        "from dist_aclgraph.graphs.digest import OperatorDigest\n"
        "with OperatorDigest() as digest: torch.ones(2) + 1\n"
        "assert digest.hexdigest() != OperatorDigest().hexdigest()"
    )

    assert "torch._dynamo" not in imported_by(code)


@pytest.mark.slow
def test_torch_loads_in_a_test_process_that_nobody_has_prepared() -> None:
    """Even without the variables that ``make`` exports, torch must not load torch_npu
    automatically.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    code = "import tests.conftest, torch, sys; sys.exit('torch_npu' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
