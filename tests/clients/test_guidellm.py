from __future__ import annotations

import json

from tests.clients.conftest import CHECKPOINT, client_program, run


def test_all_requests_of_a_load_succeed(service, tmp_path):
    report = tmp_path / "report.json"

    run(
        *(client_program("guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={service.url}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", "kind=max_requests,count=20"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
        *("--tokenizer", f"kind=hf_auto,model={CHECKPOINT}"),
        *("--output", f"kind=json,path={report}"),
        cwd=tmp_path,
    )

    (found,) = json.loads(report.read_text())["benchmarks"]
    assert len(found["requests"]["successful"]) == 20
    assert not found["requests"]["errored"]
    assert all(request["output_tokens"] == 8 for request in found["requests"]["successful"])
