"""Our setup program starts the same command as Ray's own setup program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated.common_pb2 import PYTHON

from dist_aclgraph.actors.forks.forking_starter import WORKER_SETUP
from dist_aclgraph.actors.forks.worker_setup import command_of, take_over

WAIT_S = 180.0
text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20)
variables = st.dictionaries(
    st.sampled_from(["A_ONE", "A_TWO", "A_THREE"]),
    st.one_of(text, st.sampled_from(["${A_ONE}:x", "$A_TWO y", "${NOT_THERE}z", "${lower}"])),
)


@given(variables, st.lists(text, max_size=4), st.sampled_from([None, "python3 -I 'a b'"]))
def test_the_setup_program_starts_the_same_command_as_ray(
    variables: dict[str, str], arguments: list[str], executable: str | None
) -> None:
    context = RuntimeEnvContext(env_vars=variables, py_executable=executable)
    started: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(os, "execvp", lambda file, args: started.append(args[-1]))
        context.exec_worker(list(arguments), PYTHON)
        wanted = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        take_over(variables)
        found = dict(os.environ)

    command = command_of(json.loads(context.serialize()), arguments)

    assert found == wanted
    assert command is not None
    assert command.split() == started[0].split()


@pytest.mark.parametrize(
    "options", [{"command_prefix": ["true &&"]}, {"override_worker_entrypoint": "other.py"}]
)
def test_rays_program_runs_unsupported_environments(options: dict[str, object]) -> None:
    context = RuntimeEnvContext(**options)
    assert command_of(json.loads(context.serialize()), []) is None


@pytest.mark.parametrize("options", [{}, {"command_prefix": ["echo 'before it';"]}])
def test_the_worker_gets_arguments_and_variables(
    tmp_path: Path, options: dict[str, list[str]]
) -> None:
    program = tmp_path / "worker.py"
    program.write_text("import os, sys; print(sys.argv[1:], os.environ['A_ONE'])")
    context = RuntimeEnvContext(env_vars={"A_ONE": "1 2"}, **options)
    arguments = [f"--serialized-runtime-env-context={context.serialize()}", "--language=PYTHON"]

    ended = subprocess.run(
        [sys.executable, str(WORKER_SETUP), str(program), "--a=b c", *arguments],
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip

    assert ended.stdout.splitlines()[-1:] == ["['--a=b c'] 1 2"], ended.stderr
    assert ("before it" in ended.stdout) == bool(options)
