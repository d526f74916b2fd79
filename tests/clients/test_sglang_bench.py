"""The parts of SGLang's ``bench_serving`` that use OpenAI's API work with the service."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import CHECKPOINT, CLIENTS, client_program, run

# The client is unmodified. It imports packages of SGLang's engine, which need CUDA, so the test
# replaces these packages by empty modules. The client uses only one constant of these packages. The
# test sets this constant.
CODE = """
import runpy, sys, types
root = sys.argv.pop(1)
def leave_empty(name, **constants):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [f"{root}/{name.replace('.', '/')}"]
    vars(module).update(constants)
for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation"):
    leave_empty(name)
leave_empty("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
def test_all_requests_of_a_load_succeed(service, tmp_path, backend):
    found = list(CLIENTS.parent.glob("lib/python*/site-packages/sglang/bench_serving.py"))
    if not found:
        pytest.skip(f"sglang is not in {CLIENTS.parent.name}; make setup-clients")
    result = tmp_path / "result.jsonl"
    run(
        *(client_program("python"), "-c", CODE, str(found[0].parents[1]), "--backend", backend),
        *("--base-url", service.url, "--model", str(CHECKPOINT), "--tokenizer", str(CHECKPOINT)),
        *("--served-model-name", "tiny-qwen3", "--dataset-name", "random-ids"),
        *("--num-prompts", "20", "--random-input-len", "20", "--random-output-len", "8"),
        *("--output-file", str(result)),
        cwd=tmp_path,
    )

    assert json.loads(result.read_text().splitlines()[-1])["completed"] == 20
