"""``vllm bench serve`` works with the service; it reads the model's name from /v1/models."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import CHECKPOINT, client_program, run

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


REMEDY = "install it there, with CUDA's packages, which setup-clients leaves out"


@pytest.mark.parametrize("backend", ENDPOINTS)
def test_all_requests_of_a_load_succeed(service, tmp_path, backend):
    run(
        *(client_program("vllm", REMEDY), "bench", "serve", "--backend", backend),
        *("--base-url", service.url, "--endpoint", ENDPOINTS[backend]),
        *("--tokenizer", str(CHECKPOINT), "--dataset-name", "random", "--num-prompts", "20"),
        *("--random-input-len", "20", "--random-output-len", "8"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    )

    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 20
