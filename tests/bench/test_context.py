"""The bench of shared contexts runs on two ranks. It splits caches into one or two shards, and
prompts among one or two ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.runs import Bench, assert_says_what_ran_it, run_bench

pytestmark = [pytest.mark.cluster, pytest.mark.bench]

NUMBERS = (1, 2)  # numbers of shards, and also numbers of ranks that share a prompt
CONTEXTS, PROMPT, BLOCKS, BLOCK_SIZE, LAYERS = (64, 256), 256, 2, 128, 2
PART_OF_A_STEP = 0.15  # relative tolerance of a mean over eight steps
HEADS_OF_A_RANK, LATENT, ROPE, FLOAT_BYTES, ALIGNED = 4, 512, 64, 4, 8


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    size = {
        "ranks": 2,
        "layers": LAYERS,
        "shards": "1,2",
        "prompt-ranks": "1,2",
        "contexts": ",".join(map(str, CONTEXTS)),
        "prompts": PROMPT,
        "blocks": BLOCKS,
        "steps": 8,
        "repeats": 1,
    }
    options = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    return run_bench("context", options, tmp_path_factory.mktemp("bench"))


def test_two_shards_take_half_the_bytes_and_serve_twice_the_context(bench: Bench) -> None:
    one, two = bench.results["caches"]

    bytes_per_token = LAYERS * (LATENT + ROPE) * FLOAT_BYTES
    assert one["tokens"] == two["tokens"] == one["longest"] == BLOCKS * BLOCK_SIZE + 1
    assert one["kv_bytes"] == BLOCKS * BLOCK_SIZE * bytes_per_token
    assert two["kv_bytes"] == one["kv_bytes"] / 2
    assert two["longest"] == 2 * BLOCKS * BLOCK_SIZE + 1
    assert two["longest_kv_bytes"] == two["cache_bytes"] == one["cache_bytes"]
    assert one["served"] == two["served"] == [16, 16]


def test_steps_are_measured_for_each_number_of_shards_and_context(bench: Bench) -> None:
    rows: list[dict[str, Any]] = bench.results["decodes"]

    assert [(row["dcp"], row["context"]) for row in rows] == [
        (dcp, context) for dcp in NUMBERS for context in CONTEXTS
    ]
    for row in rows:
        assert row["step_ms"] > 0 and row["skipped_step_ms"] > 0 and row["host_us"] > 0
        assert len(row["step_ratio"]["rounds"]) == len(row["host_ratio"]["rounds"]) == 1
    for row in rows[: len(CONTEXTS)]:
        assert row["step_ratio"]["median"] == row["host_ratio"]["median"] == 1


def test_shards_cost_two_collectives_a_layer_whatever_the_context(bench: Bench) -> None:
    # The mean covers only a few steps, and a part of the last step's work may be counted in the
    # next step.
    rows = bench.results["decodes"]
    one, one_longer, two, two_longer = [row["collectives"] for row in rows]
    bytes_one, bytes_one_longer, bytes_two, bytes_two_longer = [
        row["collective_bytes"] for row in rows
    ]

    assert one == pytest.approx(one_longer, abs=1) and two == pytest.approx(two_longer, abs=1)
    assert bytes_one == pytest.approx(bytes_one_longer, rel=PART_OF_A_STEP)
    assert bytes_two == pytest.approx(bytes_two_longer, rel=PART_OF_A_STEP)
    assert two - one == pytest.approx(2 * LAYERS, abs=1)
    # From the other rank, this rank receives the queries of the other rank's heads. It also
    # receives partial results of its own heads.
    heads = HEADS_OF_A_RANK
    found = heads * LATENT + -(-heads // ALIGNED) * ALIGNED
    values = heads * (LATENT + ROPE) + found
    added = LAYERS * values * FLOAT_BYTES
    assert bytes_two - bytes_one == pytest.approx(added, rel=PART_OF_A_STEP)


def test_prompt_ranks_share_the_work_and_exchange_new_keys(bench: Bench) -> None:
    one, two = bench.results["prompts"]

    assert [row["prompt"] for row in (one, two)] == [PROMPT, PROMPT]
    assert one["work"] == [PROMPT * (PROMPT + 1) // 2]
    assert sum(two["work"]) == one["work"][0] and len(two["work"]) == 2
    assert two["work_ratio"] == pytest.approx(0.5, abs=0.02)
    assert one["first_token_ms"] > 0 and two["first_token_ms"] > 0
    # There is one collective per layer for new latents, and one for the last hidden state.
    assert two["collectives"] - one["collectives"] == LAYERS + 1
    assert one["collective_bytes"] < two["collective_bytes"]


def test_every_output_says_what_ran_it_and_that_it_is_no_figure_of_an_npu(bench: Bench) -> None:
    assert_says_what_ran_it(bench)
