"""The rule that divides attention heads among ranks."""

from __future__ import annotations

from collections.abc import Iterable

from dist_aclgraph.errors import ConfigError

# With latent attention, a rank can have up to this number of heads; the operator needs a power of
# two.
MAX_LATENT_HEADS = 128
# If a query head has this width, including its rotated part, the operator of latent attention
# accepts the rotated part and the other part as separate inputs. For heads of other widths, both
# parts must be joined: see ``attend_whole_heads``.
PARTED_HEAD = 192
# npu_chunk_gated_delta_rule accepts at most this number of value heads.
MAX_LINEAR_VALUE_HEADS = 64
MAX_SHARDS = 16  # maximum number of shards whose results npu_attention_update merges


def heads_per_rank(num_heads: int, tp: int, *, is_latent: bool, pads_heads: bool = True) -> int:
    """Return the number of attention heads on each of ``tp`` ranks.

    Args:
        pads_heads: whether latent attention adds heads of zeros up to ``padded_latent_heads``.

    Raises:
        ConfigError: the heads cannot be divided evenly, or latent attention does not support the
            number of heads per rank.
    """
    count, rest = divmod(num_heads, tp)
    if is_latent and not pads_heads and (rest or not _takes_latent_heads(count)):
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads into "
            f"powers of two up to {MAX_LATENT_HEADS}, the numbers of heads that sparse latent "
            "attention can have on a rank"
        )
    if is_latent and (rest or count > MAX_LATENT_HEADS):
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads into at "
            f"most {MAX_LATENT_HEADS} for each rank, the limit of latent attention"
        )
    if rest:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads"
        )
    return count


def padded_latent_heads(count: int) -> int:
    """Return the number of heads that the operator of latent attention gets: the smallest power of
    two that is at least ``count``.
    """
    return 1 << (count - 1).bit_length()


def kv_heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """Return the number of KV heads on one rank. If there are more ranks than heads, several ranks
    have copies of the same head.

    Raises:
        ConfigError: the heads cannot be divided evenly among the ranks.
    """
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_kv_heads} KV heads, or be a "
            "multiple of them"
        )
    return max(1, num_kv_heads // tp)


def linear_heads_per_rank(num_key_heads: int, num_value_heads: int, tp: int) -> tuple[int, int]:
    """Return the number of key heads and the number of value heads that linear attention has on
    each of ``tp`` ranks.

    Raises:
        ConfigError: the key heads cannot be divided evenly, or a rank would have too many value
            heads.
    """
    if num_key_heads % tp:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the {num_key_heads} key heads of the model's "
            "linear attention"
        )
    value_heads = num_value_heads // tp
    if value_heads > MAX_LINEAR_VALUE_HEADS:
        raise ConfigError(
            f"parallel.tp is {tp}: each rank would have {value_heads} value heads of linear "
            f"attention, and its operators take up to {MAX_LINEAR_VALUE_HEADS}: raise parallel.tp"
        )
    return num_key_heads // tp, value_heads


def check_shards(
    num_heads: int,
    num_kv_heads: int,
    tp: int,
    *,
    num_shards: int,
    num_prompt_ranks: int,
    is_latent: bool,
) -> None:
    """Check that all ranks that share a KV cache have the same KV heads. Without ``dcp``, each of
    these ranks stores a copy of the same KV.

    Args:
        num_shards: ``parallel.dcp``; num_prompt_ranks: ``parallel.pcp``.

    Raises:
        ConfigError: the ranks have different KV heads, there are too many shards, or attention
            would have too many heads on each rank.
    """
    if num_shards == 1:
        return
    copies = tp if is_latent else max(1, tp // num_kv_heads)
    # Maps each allowed number of shards to the number of TP ranks in a DCP group. These TP ranks
    # have different query heads. The ranks gather their queries, and each rank computes attention
    # for all queries.
    legal = {num_prompt_ranks * n: n for n in range(1, copies + 1) if copies % n == 0}
    if num_shards not in legal:
        count = copies * num_prompt_ranks
        holders = f"{count} ranks hold" if count > 1 else "no two ranks hold"
        raise ConfigError(
            f"parallel.dcp is {num_shards}; {holders} the same KV of this model, and shards can "
            f"only replace such copies: {_remedy(legal)}"
        )
    if num_shards > MAX_SHARDS:
        raise ConfigError(
            f"parallel.dcp is {num_shards}; attention merges what up to {MAX_SHARDS} shards found: "
            f"{_remedy(legal)}"
        )
    count = num_heads // tp
    heads = (padded_latent_heads(count) if is_latent else count) * legal[num_shards]
    if is_latent and not _takes_latent_heads(heads):
        raise ConfigError(
            f"parallel.dcp is {num_shards}; each rank would attend with the {heads} heads of "
            f"{legal[num_shards]} ranks, and latent attention takes powers of two up to "
            f"{MAX_LATENT_HEADS}: lower parallel.dcp, or set it to 1"
        )


def _takes_latent_heads(count: int) -> bool:
    return count <= MAX_LATENT_HEADS and not count & (count - 1)


def _remedy(legal: Iterable[int]) -> str:
    others = [str(count) for count in legal if 1 < count <= MAX_SHARDS]
    return "set parallel.dcp to 1" + (f", or to {' or '.join(others)}" if others else "")
