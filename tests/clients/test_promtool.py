"""promtool, a program of Prometheus, finds no fault in the service's metrics."""

from __future__ import annotations

import subprocess

import httpx

from tests.clients.conftest import MODEL, program


def test_metrics_have_no_fault(service):
    body = {"model": MODEL, "prompt": "1", "max_tokens": 2}
    httpx.post(f"{service.api}/completions", json=body, timeout=60.0)
    text = httpx.get(f"{service.url}/metrics", timeout=60.0).text

    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
