"""Schemathesis checks that services conform to their OpenAPI document."""

from __future__ import annotations

import re

import pytest

from tests.clients.conftest import client_program, run

# The excluded checks would fail for three reasons. The document does not state every rule of a
# body, for example that a text must not be empty. A body with too many items gets the status 413.
# The answer to OPTIONS lists the methods of all paths.
EXCLUDED = "positive_data_acceptance,negative_data_rejection,allow_header_conformance"


@pytest.mark.parametrize("name", ["service", "agent", "embedder"])
def test_no_promise_of_the_document_is_broken(request, tmp_path, name):
    output = run(
        client_program("schemathesis"),
        "run",
        f"{request.getfixturevalue(name).url}/openapi.json",
        *("--checks", "all", "--exclude-checks", EXCLUDED),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "15", "--seed", "1"),
        *("--generation-deterministic", "--request-timeout", "300"),  # 300 s, for a busy machine
        cwd=tmp_path,  # schemathesis writes a cache into its working directory
    )

    found = re.search(r"(\d+) generated, (\d+) passed", output)
    assert found is not None
    assert int(found[1]) == int(found[2]) > 500
