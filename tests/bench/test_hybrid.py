"""The bench of hybrid, sparse and dense models counts the bytes of cache that a request needs in
each architecture.

The tests do not check times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.runs import run_bench

pytestmark = pytest.mark.bench  # three models are captured

LAYERS = 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    size = ["--layers", str(LAYERS), "--batch", "2", "--steps", "8", "--rounds", "1"]
    out: Path = tmp_path_factory.mktemp("bench")
    found: dict[str, dict[str, float]] = run_bench("hybrid", size, out).results["rows"]
    return found


def test_only_attention_with_lengths_on_the_host_is_updated(
    rows: dict[str, dict[str, float]],
) -> None:
    assert rows["updates of a step"] == {"dense": LAYERS, "hybrid": LAYERS // 4, "sparse": 0}


def test_bytes_of_a_request_are_those_of_its_keys_and_states(
    rows: dict[str, dict[str, float]],
) -> None:
    # The dense model keeps keys and values of two heads of size 64. The hybrid model also keeps
    # matrices of 8 heads and three inputs of the convolution. The sparse model keeps the latent,
    # the rotated key and the indexer's key.
    key, latent = 2 * 2 * 64 * 2, (512 + 64 + 128) * 2
    state = 3 * (8 * 128 * 128 + 3 * (2 * 4 + 8) * 128) * 2

    for name, tokens in (("1k", 1 << 10), ("32k", 32 << 10), ("128k", 128 << 10)):
        assert rows[f"bytes of a request of {name} tokens"] == {
            "dense": LAYERS * key * tokens,
            "hybrid": key * tokens + state,
            "sparse": LAYERS * latent * tokens,
        }
    assert rows["bytes copied for a shared prefix"] == {"dense": 0, "hybrid": state, "sparse": 0}


def test_all_times_are_measured(rows: dict[str, dict[str, float]]) -> None:
    times = {what: row for what, row in rows.items() if what.endswith(", us")}

    assert len(times) == 4
    assert all(us > 0 for row in times.values() for us in row.values())
