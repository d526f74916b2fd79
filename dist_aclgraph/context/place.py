"""In context parallelism, a rank has two indices: the index of its KV shard, and its index among
the ranks that split prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.context.shards import Shards


@dataclass(frozen=True)
class ContextPlace:
    """The indices of one rank in context parallelism.

    Attributes:
        shards: the division of the requests' caches into shards.
        shard: index of this rank's shard.
        num_prompt_ranks: number of ranks that split prompts.
        prompt_rank: index of this rank among the ranks that split prompts.
    """

    shards: Shards
    shard: int = 0
    num_prompt_ranks: int = 1
    prompt_rank: int = 0

    @property
    def is_sharded(self) -> bool:
        return self.shards.count > 1

    @property
    def whole(self) -> ContextPlace:
        """The indices of this rank for a cache that is not divided. Each rank has a whole copy of
        such a cache.
        """
        return replace(self, shards=Shards(self.shards.tokens_per_block), shard=0)
