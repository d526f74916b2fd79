from __future__ import annotations

import json

from tests.clients.conftest import CHECKPOINT, MODEL, client_program, run


def test_all_requests_of_a_load_succeed(service, tmp_path):
    run(
        *(client_program("aiperf"), "profile", "--model", MODEL, "--url", service.url),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "4"),
        *("--request-count", "20", "--isl", "20", "--osl", "8", "--tokenizer", str(CHECKPOINT)),
        *("--artifact-dir", str(tmp_path), "--ui", "none", "--no-gpu-telemetry"),
        cwd=tmp_path,
        HF_HUB_OFFLINE="",  # in offline mode, aiperf does not accept a tokenizer's path
    )

    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 20
    assert not found["error_summary"]
    assert found["output_sequence_length"]["max"] <= 8
