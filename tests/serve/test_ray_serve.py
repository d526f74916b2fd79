"""The Serve application and its command, on a real Ray, over a fake engine inside the replica."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import CONFIG

ROOT = Path(__file__).parents[2]
SERVE = """
import sys, ray
from dist_aclgraph.config import load_config
from dist_aclgraph.environment import prepare_ray_environment
from dist_aclgraph.cli.serve import serve_until_signal

def start(config):
    from tests.serve.test_llm import FakeDeployment
    return FakeDeployment()

prepare_ray_environment()
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
serve_until_signal(load_config(sys.argv[1], {"serve.port": int(sys.argv[2])}), start)
ray.shutdown()
"""


@pytest.mark.cluster
def test_serve_answers_and_a_signal_stops_everything():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", SERVE, str(CONFIG), str(port)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if line.startswith("curl"):
                break
        assert server.poll() is None, "".join(lines)
        url = f"http://127.0.0.1:{port}"
        body = {"model": "tiny-qwen3", "prompt": [70, 71], "max_tokens": 2, "stream": True}

        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=20)

        assert reply.text.endswith("data: [DONE]\n\n")
        whole = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=20)
        assert whole.json()["usage"]["completion_tokens"] == 2
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=40) == 0
    finally:
        if server.poll() is None:
            server.terminate()
            time.sleep(1)
            server.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=2)
