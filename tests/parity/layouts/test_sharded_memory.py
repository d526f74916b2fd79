"""With sharded caches, each rank stores only a part of a context, so a context can be longer than a
rank's cache.
"""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from tests import laws
from tests.actors.rank_processes import ANSWER_S
from tests.checkpoints import greedy, make_prompts, make_reference
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import Reference

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 12, 512
PROMPT_LEN, NUM_TOKENS = 400, 24
SHARDS = (1, 2, 4) if laws.is_full() else (1, 4)


@pytest.fixture(scope="module")
def reference(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("latents")
    model = make_reference("DeepseekV2ForCausalLM", directory, num_hidden_layers=2)
    prompts = make_prompts([PROMPT_LEN, 5])
    return Reference(directory, model, prompts, greedy(model, prompts, NUM_TOKENS))


def make_config(reference: Reference, shards: int, num_blocks: int) -> Config:
    return make_deployment_config(
        reference.directory,
        max_model_len=MAX_LEN,
        parallel={"tp": 4, "dcp": shards},
        graph={"sizes": (1, 2), "lazy": "off"},
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 128},
        kv={"block_size": BLOCK_SIZE, "num_blocks": num_blocks},
    )


@pytest.mark.slow
def test_a_context_that_fits_into_no_rank_is_served_by_shards(reference: Reference) -> None:
    """The context has 424 tokens. One rank's cache has 11 * 16 = 176 slots; the caches of four
    ranks have 704.
    """
    one_rank = lockstep(make_config(reference, 1, NUM_BLOCKS))
    with (
        pytest.raises(ConfigError, match="12 KV blocks of 16 tokens hold requests of 177"),
        one_rank,
    ):
        pass
    with lockstep(make_config(reference, 4, NUM_BLOCKS)) as group:
        answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
        report = group.report()

    assert [answer.tokens for answer in answers] == reference.tokens
    assert any(bucket["replays"] for bucket in report["buckets"])


def test_a_rank_keeps_its_share_of_a_context_to_within_one_block(reference: Reference) -> None:
    num_tokens = PROMPT_LEN + NUM_TOKENS
    used, bytes_of_block = {}, set()
    for shards in SHARDS:
        with lockstep(make_config(reference, shards, 2 * NUM_BLOCKS * 4 // shards)) as group:
            answer = group.submit("long", reference.prompts[0], greedy_params(NUM_TOKENS))
            most = 0
            while group.scheduler.has_work:
                group.turn()
                most = max(most, group.scheduler.ranks[0].pool.num_used)
            (found,) = set(group.ranks.call("kv_bytes", "SERVING", ANSWER_S))
            pool = group.scheduler.ranks[0].pool
        assert answer.tokens == reference.tokens[0]
        each, rest = divmod(found, pool.num_blocks)
        assert rest == 0
        bytes_of_block.add(each)
        used[shards] = most * each

    (block,) = bytes_of_block
    for shards in SHARDS:
        exact = num_tokens * block / BLOCK_SIZE / shards
        assert exact - block <= used[shards] <= exact + block
