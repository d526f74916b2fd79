"""The shape of linear attention with the gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear), and
the bytes of its states.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import ParallelConfig
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.shapes.heads import linear_heads_per_rank
from dist_aclgraph.shapes.model_config import MAX_HEADS, MAX_LAYERS, ModelConfig

HEAD_DIM = 128  # npu_chunk_gated_delta_rule requires keys and values of this width
MAX_CONV_WIDTH = 16
MAX_DIRECT_TOKENS = 8  # maximum number of tokens of one request, in npu_recurrent_gated_delta_rule
DEFAULT_INTERVAL = 4  # every fourth layer has full attention
# Bytes of one element of a state's matrix. CANN's operators store the matrix in bfloat16. Plain
# operators store the matrix in float32.
MATRIX_BYTES = {"bfloat16": 2, "float16": 4, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """The layers of linear attention of a decoder.

    Attributes:
        layers: layers with linear attention; the other layers attend to all keys.
        num_key_heads, num_value_heads: numbers of heads. Every key head is used by the same number
            of value heads.
        key_dim, value_dim: width of a key or query head, and of a value head.
        conv_width: width of the convolution, which combines each token with the previous
            ``conv_width - 1`` tokens.
        has_grouped_weights: whether the rows of a matrix are grouped by key head: first the
            queries, keys, values and gates of the first key head, and so on. If false, a matrix has
            first all queries, then all keys, and so on.
        decays_by_channel: whether each channel of a key has its own decay (Kimi Delta Attention).
            If false, each head has one decay.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    has_grouped_weights: bool = False
    decays_by_channel: bool = False

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def check(self, parallel: ParallelConfig, num_drafts: int) -> None:
        """Check that the ranks can divide the state of a request, and that there are not too many
        drafts.

        Raises:
            ConfigError: the heads cannot be divided evenly among the ranks, several ranks share the
                context of one request, or a request would have more tokens than the operator
                accepts.
        """
        if num_drafts >= MAX_DIRECT_TOKENS:
            raise ConfigError(
                f"speculative.num_tokens is {num_drafts}; linear attention verifies up to "
                f"{MAX_DIRECT_TOKENS - 1} drafts: lower it"
            )
        linear_heads_per_rank(self.num_key_heads, self.num_value_heads, parallel.tp)
        if parallel.dcp * parallel.pcp > 1:
            raise ConfigError(
                f"parallel.dcp is {parallel.dcp} and parallel.pcp {parallel.pcp}; linear attention "
                "keeps one state per request, which has no parts for several ranks: set both to 1, "
                "and divide its heads by parallel.tp"
            )

    def state_bytes(self, tp: int, dtype: str, element_bytes: int) -> int:
        """Return the bytes of one slot in one layer, on each of ``tp`` ranks.

        Args:
            dtype: name of the activations' type, as in the configuration.
            element_bytes: bytes of an element of this type.

        Raises:
            ConfigError: the heads cannot be divided evenly among the ranks.
        """
        _, value_heads = linear_heads_per_rank(self.num_key_heads, self.num_value_heads, tp)
        inputs = (self.conv_width - 1) * (self.num_channels // tp)
        matrices = value_heads * self.value_dim * self.key_dim
        # If each channel has its own decay, plain operators compute the gated delta rule.
        matrix_bytes = MATRIX_BYTES["float32" if self.decays_by_channel else dtype]
        return inputs * element_bytes + matrices * matrix_bytes


def read_linear_spec(config: ModelConfig) -> LinearSpec | None:
    """Read the layers of linear attention; None if the model has no such layers.

    Raises:
        ModelError: a key is missing or has an impossible value.
        UnsupportedModelError: the operators do not support the heads.
    """
    linear = _read_layers(config)
    if linear is not None and len(linear.layers) == config.integer("num_hidden_layers"):
        raise config.unsupported(
            "every layer has linear attention; at least one layer must have full attention"
        )
    return linear


def _read_layers(config: ModelConfig) -> LinearSpec | None:
    if (kimi := config.part("linear_attn_config")) is not None:
        return _kimi_spec(
            _kimi_layers(config, kimi),
            kimi.integer("num_heads", most=MAX_HEADS),
            kimi.integer("head_dim"),
            kimi.integer("short_conv_kernel_size", least=2, most=MAX_CONV_WIDTH),
        )
    if config.has("linear_num_heads"):  # Kimi Linear, as transformers saves it
        return _kimi_spec(
            _linear_layers(config),
            config.integer("linear_num_heads", most=MAX_HEADS),
            config.integer("linear_head_dim"),
            config.integer("linear_conv_kernel_dim", least=2, most=MAX_CONV_WIDTH),
        )
    if not config.has("linear_num_value_heads"):
        return None
    linear = LinearSpec(
        layers=_linear_layers(config),
        num_key_heads=config.integer("linear_num_key_heads", most=MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", most=MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_width=config.integer("linear_conv_kernel_dim", least=2, most=MAX_CONV_WIDTH),
        has_grouped_weights=config.architecture.startswith("Qwen3Next"),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise ModelError(
            f"{config.path}: linear_num_value_heads is {linear.num_value_heads}; it must be a "
            f"multiple of linear_num_key_heads, {linear.num_key_heads}"
        )
    if (linear.key_dim, linear.value_dim) != (HEAD_DIM, HEAD_DIM):
        raise config.unsupported(
            f"linear_key_head_dim and linear_value_head_dim are {linear.key_dim} and "
            f"{linear.value_dim}; the operators of linear attention take {HEAD_DIM} only"
        )
    return linear


def _kimi_layers(config: ModelConfig, linear: ModelConfig) -> frozenset[int]:
    """Return the indices, from 0, of Kimi Linear's layers with linear attention. config.json counts
    layers from 1.
    """
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    delta, full = (linear.integers(key) for key in ("kda_layers", "full_attn_layers"))
    if sorted((*delta, *full)) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"{config.path}: kda_layers and full_attn_layers must name each of the layers 1 to "
            f"{num_layers} once"
        )
    return frozenset(layer - 1 for layer in delta)


def _kimi_spec(layers: frozenset[int], num_heads: int, dim: int, conv_width: int) -> LinearSpec:
    return LinearSpec(
        layers=layers,
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=conv_width,
        decays_by_channel=True,
    )


def _linear_layers(config: ModelConfig) -> frozenset[int]:
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    types = config.texts("layer_types")
    if not types:
        interval = config.integer("full_attention_interval", DEFAULT_INTERVAL, most=MAX_LAYERS)
        return frozenset(i for i in range(num_layers) if (i + 1) % interval)
    if len(types) != num_layers:
        raise ModelError(
            f"{config.path}: layer_types has {len(types)} entries; num_hidden_layers is "
            f"{num_layers}, and each layer needs one entry"
        )
    if unknown := set(types) - {"linear_attention", "full_attention"}:
        raise config.unsupported(
            f"layer_types contains {min(unknown)!r:.80}; supported beside linear attention: "
            "linear_attention, full_attention"
        )
    return frozenset(i for i, each in enumerate(types) if each == "linear_attention")
