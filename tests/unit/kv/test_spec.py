"""Byte formulas, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.spec import KVCacheSpec, elements_per_token, kv_heads_per_rank
from dist_aclgraph.model_facts import ModelFacts


def make_spec(**changes) -> KVCacheSpec:
    values = {"num_layers": 64, "elements_per_token": 2 * 128, "block_size": 128}
    return KVCacheSpec(**(values | changes))


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    # 2 x 128 tokens x 1 head x 128 x 2 bytes = 65536 for one layer
    assert make_spec().bytes_per_layer_block == 65536
    assert make_spec().bytes_per_block == 64 * 65536
    assert make_spec(dtype="float32").total_bytes(3) == 3 * 2 * 64 * 65536


def make_facts(**changes) -> ModelFacts:
    values = {
        "architecture": "DeepseekV3ForCausalLM",
        "num_layers": 61,
        "num_heads": 128,
        "num_kv_heads": 128,
        "head_size": 64,
        "max_model_len": 163840,
    }
    return ModelFacts(**(values | changes))


def test_every_rank_keeps_the_whole_latent_and_its_own_heads() -> None:
    latent, grouped = make_facts(latent_size=576), make_facts(num_kv_heads=8, head_size=128)

    assert [elements_per_token(latent, tp) for tp in (1, 8, 16)] == [576] * 3
    assert [elements_per_token(grouped, tp) for tp in (1, 8, 16)] == [2048, 256, 256]


def test_a_token_of_deepseek_v3_takes_seventy_thousand_bytes() -> None:
    spec = make_spec(num_layers=61, elements_per_token=576)

    assert spec.bytes_per_block / spec.block_size == 70272


def test_the_last_tokens_take_a_whole_block() -> None:
    assert [make_spec().blocks_for(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]


def test_fraction_and_limit_both_bound_the_cache() -> None:
    spec = make_spec(num_layers=1)

    assert spec.blocks_that_fit(10 * 65536, 0.5, 1 << 40) == 5
    assert spec.blocks_that_fit(10 * 65536, 0.5, 3 * 65536) == 3


def test_a_cache_too_small_for_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 1 KV blocks"):
        make_spec(num_layers=1).blocks_that_fit(65536, 1.0, 1 << 40)


def test_heads_are_split_or_repeated_over_ranks() -> None:
    assert [kv_heads_per_rank(8, tp) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]
    with pytest.raises(ConfigError, match="8 KV heads"):
        kv_heads_per_rank(8, 3)
