"""``vllm bench serve`` works with the service; it reads the model's name from /v1/models."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import CHECKPOINT, ROOT, run

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
VLLM = ROOT / ".venv-vllm"  # virtual environment in which vLLM runs from its sources, without CUDA


@pytest.mark.parametrize("backend", ENDPOINTS)
def test_all_requests_of_a_load_succeed(service, tmp_path, backend):
    if not VLLM.exists():
        pytest.skip(f"{VLLM.name} does not exist; make setup-vllm")

    # In this environment, transformers imports torch_npu, which needs the libraries of CANN.
    python = str(VLLM / "bin" / "python")
    run(
        *(python, "-m", "dist_aclgraph.device.emulator", "run", "--"),
        *(python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend),
        *("--base-url", service.url, "--endpoint", ENDPOINTS[backend]),
        *("--tokenizer", str(CHECKPOINT), "--dataset-name", "random", "--num-prompts", "20"),
        *("--random-input-len", "20", "--random-output-len", "8"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        PYTHONPATH=f"{VLLM / 'vllm'}:{ROOT}",
    )

    assert json.loads((tmp_path / "result.json").read_text())["completed"] == 20
