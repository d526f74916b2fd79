"""Schemathesis checks that the service conforms to its OpenAPI document."""

from __future__ import annotations

import re

from tests.clients.conftest import client_program, run


def test_no_promise_of_the_document_is_broken(service, tmp_path):
    output = run(
        client_program("schemathesis"),
        "run",
        f"{service.url}/openapi.json",
        *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "15", "--seed", "1"),
        *("--generation-deterministic", "--request-timeout", "30"),
        cwd=tmp_path,  # it writes a cache into its working directory
    )

    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None
    assert int(found[1]) == int(found[2]) > 500
