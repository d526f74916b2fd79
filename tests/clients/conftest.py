"""Unmodified clients of other projects use a service on an emulated NPU (``make test-clients``).

The Python clients have a virtual environment of their own. If a client is not installed, its test
is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tiny-qwen3.yaml"
CHECKPOINT = ROOT / "models" / "tiny-qwen3"
CLIENTS = ROOT / ".venv-clients" / "bin"
MODEL = "tiny-qwen3"
COUNT = "Count from 3 to 9."
COUNTED = "3 4 5 6 7 8 9"  # the model's answer to COUNT
START_S, RUN_S, STOP_S = 120.0, 240.0, 60.0
# With these settings, clients send requests only to the service, and not to other hosts.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": "none",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


@dataclass
class Service:
    """A running ``dist-aclgraph serve``. ``api`` is the base URL that OpenAI's clients need."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api(self) -> str:
        return f"{self.url}/v1"


def wait_for(url: str, process: subprocess.Popen[Any], seconds: float = START_S) -> None:
    """Wait, at most ``seconds``, until a request to ``url`` gets status 200."""
    until_s = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        assert process.poll() is None, f"it has ended with {process.returncode}"
        assert time.monotonic() < until_s, f"{url} does not answer"
        time.sleep(0.1)


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[None]:
    """Run the server ``command`` within this context. The context begins when ``url`` answers with
    status 200.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(url, process)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


@contextlib.contextmanager
def serving(directory: Path, *keys: str) -> Iterator[Service]:
    """Run a service in float32, so that tests can compare its numbers with a reference."""
    found = Service(free_port())
    command = [sys.executable, "-m", "dist_aclgraph.cli.main", "serve", str(CONFIG)]
    command += [
        "dtype=float32",
        "device.emulator.strict=false",
        f"serve.port={found.port}",
        'serve.allowed_origins=["*"]',
        *keys,
    ]
    with running(command, f"{found.url}/ready", directory / "log"):
        yield found


@pytest.fixture(scope="session")
def service(tmp_path_factory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture(scope="session")
def agent(tmp_path_factory) -> Iterator[Service]:
    """A service whose model was trained to call tools and to write JSON."""
    keys = f"model={ROOT / 'models' / 'tiny-agent'}", "served_model_name=tiny-agent"
    with serving(tmp_path_factory.mktemp("agent"), *keys) as found:
        yield found


@pytest.fixture(scope="session")
def embedder(tmp_path_factory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("embedder"), "task=embed") as found:
        yield found


def program(name: str) -> str:
    """Return the path of a program on this machine; skip the test if the program is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def client_program(name: str) -> str:
    """Return the path of a program in the clients' virtual environment; skip the test if it is
    missing.
    """
    path = CLIENTS / name
    if not path.exists():
        pytest.skip(f"{name} is not in {CLIENTS.parent.name}; make setup-clients")
    return str(path)


def run(*command: str, cwd: Path | None = None, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **OFFLINE, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run_python(module: str, code: str, **variables: str) -> Any:
    """Run code in the clients' virtual environment; return the JSON value of the last line that it
    prints.
    """
    python = client_program("python")
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"{module} is not in {CLIENTS.parent.name}; make setup-clients")
    return json.loads(run(python, "-c", code, **variables).splitlines()[-1])
