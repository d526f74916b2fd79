"""Heads of ranks, and how many attend together where these share a cache."""

from __future__ import annotations

from typing import Any

import pytest

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.heads import check_shards


def check(num_heads: int, tp: int, num_shards: int, **others: Any) -> None:
    wanted = {"num_prompt_ranks": 1, "is_latent": True, "num_kv_heads": num_heads, **others}
    check_shards(num_heads, tp=tp, num_shards=num_shards, **wanted)


@pytest.mark.parametrize(
    ("num_heads", "tp", "num_shards", "together"), [(256, 4, 4, 256), (48, 6, 3, 24)]
)
def test_shards_are_refused_whose_heads_together_latent_attention_does_not_take(
    num_heads: int, tp: int, num_shards: int, together: int
) -> None:
    why = f"parallel.dcp is {num_shards}: .* attend with {together} heads together"
    with pytest.raises(ConfigError, match=why):
        check(num_heads, tp, num_shards)


def test_prompt_ranks_have_all_heads_so_that_none_are_added() -> None:
    check(256, 2, 2, num_prompt_ranks=2)
    check(256, 4, 4, num_prompt_ranks=2)
    with pytest.raises(ConfigError, match="attend with 256 heads"):
        check(256, 4, 8, num_prompt_ranks=2)


@pytest.mark.parametrize("num_shards", [3, 8])
def test_only_ranks_that_would_hold_copies_share_keys(num_shards: int) -> None:
    check(16, 8, 4, num_kv_heads=2, is_latent=False)
    with pytest.raises(ConfigError, match=r"4 ranks would hold copies: set .* one of 1, 2, 4"):
        check(16, 8, num_shards, num_kv_heads=2, is_latent=False)
