"""Linear attention of a model: layers that keep one state for each request in place of keys.

Each of these layers has the gated delta rule (arXiv 2412.06464) after a short causal convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import ParallelConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.model_config import MAX_HEADS, MAX_LAYERS, ModelConfig

LINEAR, FULL = "linear_attention", "full_attention"  # entries of layer_types


@dataclass(frozen=True, kw_only=True)
class LinearFacts:
    """The layers with linear attention, and the sizes of their state.

    Attributes:
        layers: the layers that have linear attention; other layers have full attention.
        num_key_heads, num_value_heads: several value heads share one key head.
        key_dim, value_dim: widths of one key head and of one value head.
        conv_width: number of tokens that the convolution sees, the newest token included.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def conv_elements(self, tp: int) -> int:
        """Return the elements of one layer's convolution state of one request, on one rank."""
        return (self.conv_width - 1) * self.num_channels // tp

    def recurrent_elements(self, tp: int) -> int:
        """Return the elements of one layer's recurrent state of one request, on one rank."""
        return self.num_value_heads // tp * self.value_dim * self.key_dim

    def check(self, parallel: ParallelConfig) -> None:
        """Refuse ranks among which the state of a request cannot be divided.

        Raises:
            ConfigError: ``parallel.tp`` does not divide the heads, or ranks share contexts.
        """
        tp = parallel.tp
        if self.num_key_heads % tp or self.num_value_heads % tp:
            raise ConfigError(
                f"parallel.tp is {tp}; the {self.num_key_heads} key heads and "
                f"{self.num_value_heads} value heads of linear attention cannot be divided by it: "
                "choose a divisor of both"
            )
        if parallel.dcp * parallel.pcp > 1:
            raise ConfigError(
                f"parallel.dcp is {parallel.dcp} and parallel.pcp {parallel.pcp}; linear attention "
                "keeps one state per request, which has no parts for several ranks: set both to 1, "
                "and divide its heads by parallel.tp"
            )


def read_linear_facts(config: ModelConfig) -> LinearFacts | None:
    """Read the layers with the gated delta rule; None if the model has no such layer.

    Raises:
        ModelError: a key is missing, or has an impossible value.
    """
    if not config.has("linear_num_value_heads"):
        return None
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = config.texts("layer_types")
    if not kinds:
        interval = config.integer("full_attention_interval", 4, most=MAX_LAYERS)
        kinds = tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise config.unsupported(
            f"layer_types has {len(kinds)} entries of the kinds {sorted(set(kinds))!r:.200}; it "
            f"needs one for each of {num_layers} layers, {LINEAR} or {FULL}"
        )
    return LinearFacts(
        layers=frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR),
        num_key_heads=config.integer("linear_num_key_heads", most=MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", most=MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_width=config.integer("linear_conv_kernel_dim", 4, least=2),
    )
