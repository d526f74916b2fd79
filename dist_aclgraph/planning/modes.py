"""Chooses a graph mode that the model and the device support. If the chosen mode differs from the
configured mode, the module also returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.config import Config, GraphMode
from dist_aclgraph.config.graph import DECODE_MODES
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.model_facts import ModelFacts

AttentionUpdates = Literal["any", "uniform"]

# Maximum number of tokens of a block if attention gets one query of each request in the layout
# BSND. Source: the document of aclnnFusedInferAttentionScore, in the section about paged attention.
MAX_MASKED_BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class GraphSupport:
    """The properties of the model and the deployment that decide which graph modes are possible.

    Attributes:
        attention_updates: whether "any" batch can replay captured attention, or only "uniform"
            batches, in which all requests have the same number of tokens. Each replay uses new KV
            lengths. The value is "uniform" for latent and linear attention, and "any" for sparse
            attention, which reads lengths on the device.
        is_encoder_decoder: whether the model's decoder reads the states of an encoder.
        shares_context: whether several ranks split prompts, or share the cache of a request.
    """

    attention_updates: AttentionUpdates = "any"
    is_encoder_decoder: bool = False
    shares_context: bool = False


@dataclass(frozen=True)
class _ModeRule:
    """If ``applies`` returns true, the mode ``instead`` replaces each mode of ``modes``. ``reason``
    is a sentence for users.
    """

    modes: tuple[GraphMode, ...]
    applies: Callable[[GraphSupport], bool]
    instead: GraphMode
    reason: str


_FULL: tuple[GraphMode, ...] = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")

# The first rule that applies to the mode replaces the mode. The rules are then applied to the new
# mode, until no rule applies.
_RULES: tuple[_ModeRule, ...] = (
    _ModeRule(
        _FULL,
        lambda s: s.is_encoder_decoder,
        "PIECEWISE",
        "attention to an encoder's states differs with each request, so it stays out of graphs",
    ),
    _ModeRule(
        ("FULL",),
        lambda s: s.attention_updates == "uniform",
        "FULL_AND_PIECEWISE",
        "captured attention of this model takes requests of equal lengths only",
    ),
    _ModeRule(
        ("FULL",),
        lambda s: s.shares_context,
        "FULL_AND_PIECEWISE",
        "with parallel.dcp or parallel.pcp above 1, the data that ranks exchange for a prompt "
        "depend on its length, so attention to prompts stays out of graphs",
    ),
)


def with_possible_mode(
    config: Config, facts: ModelFacts, *, launch_blocking: bool = False
) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with a supported graph mode, and the reasons for changing the mode.

    Raises:
        ConfigError: see ``normalise_mode``.
    """
    takes_any = facts.linear is None and (facts.indexer is not None or not facts.mla)
    support = GraphSupport(
        attention_updates="any" if takes_any else "uniform",
        is_encoder_decoder=facts.is_encoder_decoder,
        shares_context=config.parallel.dcp * config.parallel.pcp > 1,
    )
    mode, reasons = normalise_mode(config.graph.mode, support, launch_blocking=launch_blocking)
    changes: dict[str, object] = {"mode": mode}
    if (
        mode == "FULL_AND_PIECEWISE"
        and config.graph.mode == "FULL"
        and not config.has_decode_graphs
    ):
        changes |= _split_sizes(config)
    if config.graph.updates == "none" and (why := _why_lengths_are_sent(config, facts, mode)):
        changes["updates"] = "sent"
        reasons += (f"graph.updates is sent instead of none: {why}",)
    graph = config.graph.model_copy(update=changes)
    return config.model_copy(update={"graph": graph}), reasons


def _why_lengths_are_sent(config: Config, facts: ModelFacts, mode: GraphMode) -> str | None:
    """Return why ``graph.updates`` cannot be "none"; None if this value is possible. With this
    value, attention in graphs uses a mask, and steps send no lengths.
    """
    parallel, block_size = config.parallel, config.kv.block_size
    reasons = (
        (
            facts.indexer is not None,
            "sparse attention reads lengths on the device, so it needs no updates",
        ),
        (
            config.kv.dtype == "int8",
            "attention to latents in int8 reads lengths on the device, so it needs no updates",
        ),
        (facts.mla, "the operator of latent attention accepts no mask of its own"),
        (
            facts.window_within(facts.max_model_len(config)) is not None,
            "layers with a sliding window need the lengths of requests",
        ),
        (
            facts.has_sinks,
            "attention with sinks runs in layout TND only, which accepts no mask of its own",
        ),
        (
            block_size > MAX_MASKED_BLOCK,
            f"attention with a mask takes a kv.block_size of at most {MAX_MASKED_BLOCK}, not "
            f"{block_size}",
        ),
        (
            parallel.dcp * parallel.pcp > 1,
            "with parallel.dcp or parallel.pcp above 1, a rank sees a part of each request",
        ),
        (config.speculative.num_tokens > 0, "with drafts, a request has several queries"),
        (
            config.recovery.exact,
            "with recovery.exact, the number of keys that a step reads must not depend on other "
            "requests",
        ),
        (
            mode not in DECODE_MODES,
            f"graph.mode {mode} has no graphs for decode batches only",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def _split_sizes(config: Config) -> dict[str, object]:
    """Return new values for keys of the configuration's section ``graph``, for a mode in which
    decode batches get separate graphs. In such a mode, ``sizes`` is for decode batches, and
    ``mixed_sizes`` and ``mixed_traffic`` are for all other batches.

    Without drafts, a decode batch has one token for each request.
    """
    graph, largest = config.graph, config.scheduler.max_num_seqs
    return {
        "sizes": tuple(size for size in graph.sizes or () if size <= largest) or None,
        "mixed_sizes": graph.sizes,
        "mixed_traffic": graph.traffic,
    }


def normalise_mode(
    wanted: GraphMode, support: GraphSupport, *, launch_blocking: bool = False
) -> tuple[GraphMode, tuple[str, ...]]:
    """Return the supported mode that replaces the mode ``wanted``, and a sentence for each change
    of the mode.

    Args:
        launch_blocking: result of ``environment.launch_blocking()``. If true, every launch waits
            for the device.

    Raises:
        ConfigError: the mode has graphs, but every launch waits for the device. A capture would
            then never end.
    """
    mode, reasons = wanted, []
    while True:
        rule = next((r for r in _RULES if mode in r.modes and r.applies(support)), None)
        if rule is None:
            break
        reasons.append(f"graph.mode is {rule.instead} instead of {mode}: {rule.reason}")
        mode = rule.instead
    if launch_blocking and mode != "NONE":
        raise ConfigError(
            f"ASCEND_LAUNCH_BLOCKING is 1 and graph.mode is {mode}: a blocking launch cannot be "
            "captured; unset the variable, or set graph.mode to NONE"
        )
    return mode, tuple(reasons)


def check_partition(mode: GraphMode, *, is_soft: bool) -> None:
    """Raise an error if graphs of this mode would hang on a soft partition of an NPU.

    Args:
        is_soft: result of ``environment.is_soft_partition()``. On a soft partition, an event must
            be recorded before a wait for this event is queued. But a full graph waits for events,
            and is queued before the updates that record these events.

    Raises:
        ConfigError: the mode has full graphs.
    """
    if is_soft and mode in _FULL:
        raise ConfigError(
            f"the NPU is a soft partition (ENPU_ENABLE) and graph.mode is {mode}: full graphs hang "
            "there; set graph.mode to PIECEWISE or NONE, or use a whole NPU"
        )
