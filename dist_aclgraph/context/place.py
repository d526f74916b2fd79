"""The indices of a rank in context parallelism: its KV shard, and its index for prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dist_aclgraph.context.shards import Shards


@dataclass(frozen=True)
class ContextPlace:
    """The indices of one rank in context parallelism.

    Attributes:
        shards: how the caches of requests are divided.
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
        """The indices of the same rank for an undivided cache, which each rank has as a whole."""
        return replace(self, shards=Shards(self.shards.tokens_per_block), shard=0)
