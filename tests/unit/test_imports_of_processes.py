"""Tests what processes import; an unnecessary import costs seconds of CPU time in each process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "torch_npu", "transformers", "sympy", "scipy", "pandas", "matplotlib"}
WITHOUT_TORCH = (
    "client.engine_client",
    "controller.controller",
    "controller.startup",
    "deployment.deployment",
    "engine.engine",
    "worker.worker",
)


def imported_by(code: str) -> set[str]:
    """Return the names of loaded modules after a new process has run ``code``."""
    show = "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, check=True)
    return set(done.stdout.decode().split())


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_processes_that_compute_nothing_import_no_torch(name: str) -> None:
    assert not imported_by(f"import dist_aclgraph.actors.{name}") & HEAVY


def test_the_service_imports_no_torch() -> None:
    assert not imported_by("import dist_aclgraph.cli.serve, dist_aclgraph.serve.app") & HEAVY


def test_the_package_imports_neither_torch_nor_ray() -> None:
    assert not imported_by("import dist_aclgraph, dist_aclgraph.cli.main") & (HEAVY | {"ray"})


def test_what_a_worker_is_placed_with_does_not_load_the_torch_of_its_rank() -> None:
    """Ray imports the module before the rank's environment is set, so it must not load torch."""
    assert not imported_by("import dist_aclgraph.actors.worker.rank_stages") & HEAVY


def test_recording_operators_does_not_load_the_compiler() -> None:
    """Otherwise, a rank would load torch's compiler in its first capture."""
    code = (
        "import torch\n"
        "from dist_aclgraph.graphs.digest import OperatorDigest\n"
        "with OperatorDigest() as digest: torch.ones(2) + 1\n"
        "assert digest.hexdigest() != OperatorDigest().hexdigest()"
    )

    assert "torch._dynamo" not in imported_by(code)


@pytest.mark.slow
def test_torch_loads_in_a_test_process_that_nobody_has_prepared() -> None:
    """Without the variables that ``make`` exports, torch must not load torch_npu automatically."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    code = "import tests.conftest, torch, sys; sys.exit('torch_npu' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
