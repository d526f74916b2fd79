"""The layers in which a query sees only the latest keys.

Each architecture has a rule. Keys, their precedence and their defaults are as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.shapes.model_config import MAX_CONTEXT, MAX_LAYERS, ModelConfig

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class SlidingWindow:
    """Layers in which a query sees only the latest keys.

    Attributes:
        num_keys: number of keys that a query sees, the key of its own token included.
    """

    num_keys: int
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """How an architecture describes its windows in config.json.

    Attributes:
        usual: number of keys if the key ``sliding_window`` is absent; None means no window. If the
            key is null, no layer has a window.
        layers: the layers with a window: all; every second layer, beginning with layer 0; or the
            layers from ``max_window_layers`` on, by default from layer 28 on.
        by_type: whether ``layer_types`` replaces ``layers``.
        by_switch: whether no layer has a window without ``use_sliding_window``.
    """

    usual: int | None = 4096
    layers: Literal["all", "every second", "later"] = "all"
    by_type: bool = True
    by_switch: bool = False


RULES = {
    "Qwen2ForCausalLM": _Rule(layers="later", by_switch=True),
    "Qwen3ForCausalLM": _Rule(layers="later", by_switch=True),
    "Qwen3MoeForCausalLM": _Rule(by_type=False, by_switch=True),
    "GptOssForCausalLM": _Rule(usual=128, layers="every second"),
    "MistralForCausalLM": _Rule(),
    "Mistral3ForConditionalGeneration": _Rule(),
    "MinistralForCausalLM": _Rule(),
    "MixtralForCausalLM": _Rule(usual=None, by_type=False),
    "Phi3ForCausalLM": _Rule(usual=None, by_type=False),
}


def read_sliding_window(config: ModelConfig) -> SlidingWindow | None:
    """Return the window of some or all layers; None if all layers see all keys.

    Raises:
        ModelError: a key has an impossible value.
        UnsupportedModelError: ``layer_types`` has another type of layer.
    """
    rule = RULES.get(config.architecture)
    if rule is None or (rule.by_switch and not config.flag("use_sliding_window", False)):
        return None
    layers = _layers(config, rule)
    if not layers or config.raw.get("sliding_window", rule.usual) is None:
        return None
    num_keys = config.integer("sliding_window", rule.usual, most=MAX_CONTEXT)
    return SlidingWindow(num_keys, frozenset(layers))


def _layers(config: ModelConfig, rule: _Rule) -> Sequence[int]:
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
    return range(0, num_layers, 2 if rule.layers == "every second" else 1)
