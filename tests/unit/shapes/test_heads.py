"""Checks of the number of heads on one rank, and on all ranks that share a cache."""

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
    why = rf"parallel\.dcp is {num_shards}; .* attend with the {together} heads"
    with pytest.raises(ConfigError, match=why):
        check(num_heads, tp, num_shards)


def test_prompt_ranks_have_all_heads_so_that_none_are_added() -> None:
    check(256, 2, 2, num_prompt_ranks=2)
    check(256, 4, 4, num_prompt_ranks=2)
    with pytest.raises(ConfigError, match="attend with the 256 heads of 4 ranks"):
        check(256, 4, 8, num_prompt_ranks=2)
