"""``python -m dist_aclgraph.device.emulator run`` runs any program on the emulator, whatever the
program imports first.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.slow import rare, slow

RUN = [sys.executable, "-m", "dist_aclgraph.device.emulator", "run"]


def run(*arguments, cwd=None):
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    process = subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
    )
    return process.returncode, process.stdout + process.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import torch",
        rare("import torch_npu"),
        slow("import transformers, torch_npu"),
        rare("from transformers import Cache"),
    ],
)
def test_a_program_computes_whatever_it_imports_first(imports):
    code = f"""
    {imports}
    import torch
    x = torch.arange(6.0, device="npu").view(2, 3)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x @ x.t() + 1
    graph.replay()
    print("RESULT", y.tolist(), torch.npu.device_count())
    """
    status, output = run("--set", "devices=3", "--", "python", "-c", textwrap.dedent(code))
    assert status == 0 and "RESULT [[6.0, 15.0], [15.0, 51.0]] 3" in output, output


@pytest.mark.slow
def test_pytest_and_its_children_run_on_it(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import subprocess, sys
        import torch

        def test_here():
            assert torch.ones(3, device="npu").sum().item() == 3

        def test_in_a_child():
            code = "import torch; print(torch.npu.device_count())"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.stdout.split()[-1] == "2", done.stderr
        """)
    )
    status, output = run(
        "--set", "devices=2", "--", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path
    )
    assert status == 0 and "2 passed" in output, output


@pytest.mark.slow
def test_the_runtime_itself_runs_there_too():
    code = """
    import torch
    from dist_aclgraph.device import emulator
    emulator.load({"devices": 2})
    torch.ones(2, device="npu").cpu()
    print("SYNCS", emulator.counters()["host_syncs"] > 0)
    """
    status, output = run("--", "python", "-c", textwrap.dedent(code))
    assert status == 0 and "SYNCS True" in output, output


@pytest.mark.parametrize(
    "arguments,problem",
    [
        (["--set", "devices=0", "--", "python"], "devices=0: want a whole number"),
        (["--set", "colour=red", "--", "python"], "unknown setting colour"),
        (["--", "no-such-program"], "cannot run no-such-program"),
    ],
)
def test_a_program_that_cannot_run_gives_an_error_message(arguments, problem):
    status, output = run(*arguments)
    assert status == 1 and problem in output, output
