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
    if is_latent and (rest or count > MAX_LATENT_HEADS or count & (count - 1)):
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
