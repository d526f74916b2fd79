"""Which attention heads a rank has: the one home of that rule."""

from __future__ import annotations

from dist_aclgraph.errors import ConfigError

MAX_LATENT_HEADS = 128  # of a rank, and a power of two: the limits of latent attention's operator


def heads_per_rank(num_heads: int, tp: int, *, is_latent: bool) -> int:
    """Return how many attention heads each of ``tp`` ranks has.

    Raises:
        ConfigError: they cannot be divided, or into numbers that latent attention does not take.
    """
    count, rest = divmod(num_heads, tp)
    if is_latent and (rest or not _is_latent_count(count)):
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads into "
            f"powers of two up to {MAX_LATENT_HEADS}, the numbers of heads that latent attention "
            "can have on a rank"
        )
    if rest:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads"
        )
    return count


def kv_heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """Return the KV heads that one rank holds; with more ranks than heads, heads repeat.

    Raises:
        ConfigError: heads cannot be spread evenly.
    """
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_kv_heads} KV heads, or be a "
            "multiple of them"
        )
    return max(1, num_kv_heads // tp)


def check_shards(
    num_heads: int,
    num_kv_heads: int,
    tp: int,
    *,
    num_shards: int,
    num_prompt_ranks: int,
    is_latent: bool,
) -> None:
    """Check that the ranks that are to keep a cache between them would hold copies of it.

    Args:
        num_shards: ``parallel.dcp``; num_prompt_ranks: ``parallel.pcp``.

    Raises:
        ConfigError: they would not, or attention would have too many heads on each of them.
    """
    if num_shards == 1:
        return
    copies = tp if is_latent else max(1, tp // num_kv_heads)
    across_heads, rest = divmod(num_shards, num_prompt_ranks)
    if rest or copies % max(1, across_heads):
        legal = ", ".join(
            str(num_prompt_ranks * n) for n in range(1, copies + 1) if copies % n == 0
        )
        raise ConfigError(
            f"parallel.dcp is {num_shards}; of this model's KV {copies * num_prompt_ranks} ranks "
            f"would hold copies: set parallel.dcp to 1 or one of {legal}"
        )
    together = heads_per_rank(num_heads, tp, is_latent=is_latent) * across_heads
    if is_latent and not _is_latent_count(together):
        raise ConfigError(
            f"parallel.dcp is {num_shards}: {across_heads} ranks would attend with {together} "
            f"heads together; latent attention takes powers of two up to {MAX_LATENT_HEADS}: set "
            "parallel.dcp to a smaller power of two, or raise parallel.tp"
        )


def _is_latent_count(num_heads: int) -> bool:
    return num_heads <= MAX_LATENT_HEADS and num_heads & (num_heads - 1) == 0
