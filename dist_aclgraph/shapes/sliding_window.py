"""The layers in which a query sees only the latest keys.

Each architecture has a rule. The keys of config.json, their precedence and their defaults are as in
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.shapes.model_config import (
    FULL_ATTENTION,
    MAX_CONTEXT,
    MAX_LAYERS,
    SLIDING_ATTENTION,
    ModelConfig,
)

PATTERN = "sliding_window_pattern"
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION)


@dataclass(frozen=True)
class SlidingWindow:
    """Layers in which a query sees only the latest keys.

    Attributes:
        num_keys: number of keys that a query sees, the key of its own token included.
    """

    num_keys: int
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class _WindowRule:
    """The rule by which an architecture describes its windows in config.json.

    Attributes:
        usual: size of the window if config.json lacks ``sliding_window``; None means no window. If
            ``sliding_window`` is null, no layer has a window.
        layers: the layers that have a window. "every second": layers 0, 2, 4, and so on. "later":
            the layers from ``max_window_layers`` on, by default from layer 28 on. "in groups": all
            layers except the last layer of each group of ``sliding_window_pattern`` layers.
        group: number of layers of a group if the key ``sliding_window_pattern`` is absent.
        by_pattern: whether ``sliding_window_pattern`` is a key of this architecture.
        by_type: whether ``layer_types`` replaces ``layers``.
        by_switch: whether layers have windows only if ``use_sliding_window`` is true.
    """

    usual: int | None = 4096
    layers: Literal["all", "every second", "later", "in groups"] = "all"
    group: int = 4
    by_pattern: bool = True
    by_type: bool = True
    by_switch: bool = False


RULES = {
    "Qwen2ForCausalLM": _WindowRule(layers="later", by_switch=True),
    "Qwen3ForCausalLM": _WindowRule(layers="later", by_switch=True),
    "Qwen3MoeForCausalLM": _WindowRule(by_type=False, by_switch=True),
    "GptOssForCausalLM": _WindowRule(usual=128, layers="every second"),
    "MistralForCausalLM": _WindowRule(),
    "Mistral3ForConditionalGeneration": _WindowRule(),
    "MinistralForCausalLM": _WindowRule(),
    "Ministral3ForCausalLM": _WindowRule(usual=None, by_type=False),
    "MixtralForCausalLM": _WindowRule(usual=None, by_type=False),
    "Phi3ForCausalLM": _WindowRule(usual=None, by_type=False),
    "Gemma3ForCausalLM": _WindowRule(layers="in groups", group=6),
    "Gemma3ForConditionalGeneration": _WindowRule(layers="in groups", group=6),
    "Olmo3ForCausalLM": _WindowRule(layers="in groups", by_pattern=False),
    "Cohere2ForCausalLM": _WindowRule(layers="in groups"),
    "Exaone4ForCausalLM": _WindowRule(layers="in groups"),
    "Dots1ForCausalLM": _WindowRule(layers="later"),
}


def read_sliding_window(config: ModelConfig) -> SlidingWindow | None:
    """Return the window of some or all layers; None if all layers see all keys.

    Raises:
        ModelError: a key has an impossible value.
        UnsupportedModelError: ``layer_types`` has a type of layer that is not supported.
    """
    rule = RULES.get(config.architecture)
    if rule is None or (rule.by_switch and not config.flag("use_sliding_window", False)):
        return None
    layers = _layers(config, rule)
    if not layers or not sets_window(config):
        return None
    num_keys = config.integer("sliding_window", rule.usual, most=MAX_CONTEXT)
    return SlidingWindow(num_keys, frozenset(layers))


def sets_window(config: ModelConfig) -> bool:
    """Return whether config.json, or the default of the architecture, sets the size of a window.
    The answer can be true even if no layer has a window.
    """
    return config.raw.get("sliding_window", RULES[config.architecture].usual) is not None


def sliding_layers(config: ModelConfig) -> frozenset[int]:
    """Return the layers that have a window, on the assumption that config.json sets the size of a
    window.

    Raises:
        ModelError, UnsupportedModelError: see ``read_sliding_window``.
    """
    return frozenset(_layers(config, RULES[config.architecture]))


def _layers(config: ModelConfig, rule: _WindowRule) -> Sequence[int]:
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = config.texts("layer_types")
    if unknown := set(kinds) - set(LAYER_TYPES):
        raise config.unsupported(
            f"layer_types has {min(unknown):.80}; supported: {', '.join(LAYER_TYPES)}"
        )
    if kinds and rule.by_type:
        return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if rule.layers == "later":
        return range(config.integer("max_window_layers", 28, least=0), num_layers)
    if rule.layers == "in groups":
        group = _group(config, rule.group) if rule.by_pattern else rule.group
        return [i for i in range(num_layers) if (i + 1) % group]
    return range(0, num_layers, 2 if rule.layers == "every second" else 1)


def _group(config: ModelConfig, usual: int) -> int:
    """Return the number of layers of a group. config.json has this number, or a text with one
    letter for each layer of a group, such as "LLLG".
    """
    if not isinstance(config.raw.get(PATTERN), str):
        return config.integer(PATTERN, usual, most=MAX_LAYERS)
    pattern = config.text(PATTERN, "")
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise config.unsupported(
            f"{PATTERN} is {pattern:.80}; only the last layer of a group may have no window (G)"
        )
    return len(pattern)
