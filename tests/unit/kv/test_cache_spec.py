"""The formulas for bytes of caches are compared with numbers that were computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.cache_spec import KVCacheSpec, PagedTensor, elements_per_token
from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.model_facts import ModelFacts


def make_spec(num_layers: int = 64, width: int = 2 * 128, **changes) -> KVCacheSpec:
    values = {"paged": (PagedTensor(num_layers, width),), "block_size": 128}
    return KVCacheSpec(**(values | changes))


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    # One layer has 2 (keys and values) x 128 tokens x 1 head x 128 x 2 bytes = 65536 bytes.
    assert make_spec(num_layers=1).bytes_per_block == 65536
    assert make_spec().bytes_per_block == 64 * 65536
    assert make_spec(dtype="float32").total_bytes(3) == 3 * 2 * 64 * 65536


def make_facts(**changes) -> ModelFacts:
    values = {
        "architecture": "DeepseekV3ForCausalLM",
        "num_layers": 61,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_dim": 64,
        "context_len": 163840,
    }
    return ModelFacts(**(values | changes))


def test_every_rank_keeps_the_whole_latent_and_its_own_heads() -> None:
    latent, grouped = make_facts(latent_size=576), make_facts(num_kv_heads=8, head_dim=128)

    assert [elements_per_token(latent, tp) for tp in (1, 8, 16)] == [576] * 3
    assert [elements_per_token(grouped, tp) for tp in (1, 8, 16)] == [2048, 256, 256]


def test_a_token_of_deepseek_v3_takes_seventy_thousand_bytes() -> None:
    spec = make_spec(num_layers=61, width=576)

    assert spec.bytes_per_block / spec.block_size == 70272


def test_the_last_tokens_take_a_whole_block() -> None:
    assert [make_spec().blocks_for(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 16, 128]))
def test_each_shard_keeps_its_part_of_a_request_within_a_block(
    num_tokens: int, num_shards: int, interleave: int
) -> None:
    spec = make_spec(num_shards=num_shards)
    part = num_tokens / spec.block_size * spec.bytes_per_block / num_shards
    kept = spec.total_bytes(spec.blocks_for(num_tokens))

    assert part <= kept < part + spec.bytes_per_block
    # The tokens of each shard fit into the shard's part of the blocks.
    shards = Shards(spec.block_size, num_shards, interleave)
    for shard in range(num_shards):
        length = shards.lengths(np.array([num_tokens], np.int32), shard).item()
        assert length <= spec.blocks_for(num_tokens) * spec.block_size


def test_shards_lengthen_requests_and_not_blocks() -> None:
    whole, sharded = make_spec(), make_spec(num_shards=4)

    assert sharded.bytes_per_block == whole.bytes_per_block
    assert [spec.longest_request(11, 1 << 20) for spec in (whole, sharded)] == [1281, 5121]


def test_fraction_and_limit_both_bound_the_cache() -> None:
    spec = make_spec(num_layers=1)

    assert spec.blocks_that_fit(10 * 65536, 0.5, 1 << 40) == 5
    assert spec.blocks_that_fit(10 * 65536, 0.5, 3 * 65536) == 3


def test_a_cache_too_small_for_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 1 KV blocks"):
        make_spec(num_layers=1).blocks_that_fit(65536, 1.0, 1 << 40)


def make_cache_config(**sections) -> Config:
    return make_config({"model": "m", "scheduler": {"max_num_seqs": 4}, **sections})


def test_the_next_token_module_has_a_cache_of_its_own() -> None:
    facts = make_facts(latent_size=576, num_draft_layers=1)
    specs = [
        KVCacheSpec.from_config(make_cache_config(speculative={"num_tokens": k}), facts)
        for k in (0, 1, 3)
    ]

    assert [spec.paged[0].num_layers for spec in specs] == [
        61,
        62,
        62,
    ]  # the next-token module adds one layer, whatever the number of drafts is


def test_the_last_token_of_the_longest_request_takes_no_slot() -> None:
    spec = make_spec(block_size=16)

    assert [spec.longest_request(5, length) for length in (64, 65, 66)] == [64, 65, 65]


def test_a_length_that_was_asked_for_is_not_shortened() -> None:
    spec = make_spec(num_layers=1, block_size=128)
    free_bytes = 10 * 65536

    def choose(max_model_len: int | None, **kv) -> int:
        config = make_cache_config(max_model_len=max_model_len, kv={"memory_fraction": 0.5, **kv})
        return spec.choose_num_blocks(config, free_bytes, max_model_len or 4096)

    assert choose(None) == choose(4 * 128 + 1) == 5
    with pytest.raises(ConfigError, match=r"max_model_len is 514; 5 KV blocks .* of 513: lower it"):
        choose(4 * 128 + 2)
    with pytest.raises(ConfigError, match=r"hold requests of 257: lower it, or raise kv.num_block"):
        choose(4 * 128, num_blocks=3)


def test_heads_are_split_or_repeated_over_ranks() -> None:
    assert [kv_heads_per_rank(8, tp) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(ConfigError, match="8 KV heads"):
        kv_heads_per_rank(8, 3)
