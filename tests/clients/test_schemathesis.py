"""Schemathesis checks that services conform to their OpenAPI document."""

from __future__ import annotations

import re

import pytest

from tests.clients.conftest import client_program, run

# The document does not state every rule for a request's body. For example, one field can require
# another field, and a token id can be outside the vocabulary. So the service may refuse a body that
# fits the document.
EXCLUDED = "positive_data_acceptance"
# A body with too many items can exceed the limit of bytes, and gets the status 413. Schemathesis
# waits 10 s for a response by default, but a busy machine needs longer.
SETTINGS = """
[checks]
max_response_time = 300

[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 413, 415]
"""


@pytest.mark.parametrize("name", ["service", "agent", "embedder"])
def test_no_promise_of_the_document_is_broken(request, tmp_path, name):
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    output = run(
        client_program("schemathesis"),
        "run",
        f"{request.getfixturevalue(name).url}/openapi.json",
        *("--checks", "all", "--exclude-checks", EXCLUDED),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "15", "--seed", "1"),
        *("--generation-deterministic", "--request-timeout", "300"),  # seconds, for a busy machine
        # Schemathesis reads its settings from its working directory, and writes a cache there.
        cwd=tmp_path,
    )

    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None
    assert int(found[1]) == int(found[2]) > 500
