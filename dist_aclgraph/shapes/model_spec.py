"""The shape of a supported decoder, as one frozen object. This module does not need torch.

One decoder covers all families of models. Switches turn parts of the decoder on: biases of q, k and
v, of the output and of the MLP; RMS norms of q and k; latent attention in place of grouped queries;
experts in place of the MLP. ``shapes/families`` reads the shape from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.shapes.int4_formats import Int4Matrix
from dist_aclgraph.shapes.model_facts import ExpertFacts, ModelFacts
from dist_aclgraph.shapes.rope_spec import RopeSpec

# The activation function of a dense MLP. The function is applied to the gate projection, or to the
# up projection if the MLP has no gate. relu2 is the square of ReLU; xielu has two weights per layer
# (arXiv 2411.13010).
Activation = Literal["silu", "gelu_pytorch_tanh", "relu2", "xielu"]
# Kinds of attention. A "chosen" layer attends to the keys that an earlier "sparse" layer has
# chosen.
LayerKind = Literal["grouped", "latent", "linear", "sparse", "chosen"]


@dataclass(frozen=True)
class SwigluClip:
    """A gated activation whose inputs are limited: ``gate * sigmoid(alpha * gate) * (up + 1)``.

    Attributes:
        limit: larger gates are set to this value; ``up`` is limited to [-limit, limit].
    """

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class ExpertSpec(ExpertFacts):
    """The experts of a decoder, and which layers have them.

    Attributes:
        width: inner width of one expert.
        renormalizes: whether the weights of a token's experts sum to one, before ``scaling``.
        layers: indices of the layers that have experts; all other layers have a dense MLP. The
            indices of next-token layers follow the indices of the decoder's layers.
        scoring: the function that computes the weights of experts from a router's logits.
        num_groups, top_groups: experts are chosen only from the ``top_groups`` best of
            ``num_groups`` groups; both are 1 if there are no groups.
        group_score: a group's score is the score of its best expert ("max"), or the sum of its two
            best scores ("top2").
        scaling: factor for the experts' weights.
        has_bias: whether a bias is added to the scores when experts are chosen. This bias does not
            change the experts' weights.
        bias_is_row: whether the checkpoint stores this bias as a matrix of one row.
        has_product_biases: whether the router's logits and the products of experts have biases.
        shared_width: inner width of all shared experts together; None means ``num_shared`` times
            ``width``.
        gates_shared: whether the result of shared experts is multiplied by ``sigmoid`` of one
            number per token.
        clip: limits of the activation; None means SiLU of the gate without limits.
        is_stacked: whether the checkpoint stores one tensor for all experts of a layer. The tensor
            has shape [experts, in, out]; the columns of gate and up alternate.
        joined_is_transposed: whether published tensors with all experts of a layer have shape
            [experts, in, out]. If false, the shape is [experts, out, in]. Gate comes before up.
    """

    width: int
    renormalizes: bool
    layers: frozenset[int]
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0
    has_bias: bool = False
    bias_is_row: bool = False
    has_product_biases: bool = False
    shared_width: int | None = None
    gates_shared: bool = False
    clip: SwigluClip | None = None
    is_stacked: bool = False
    joined_is_transposed: bool = False

    @property
    def width_of_shared(self) -> int:
        """Inner width of all shared experts together."""
        return self.shared_width or self.num_shared * self.width


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are computed from one latent per
    token.

    Attributes:
        q_rank: width of the low-rank projection of queries; None if there is no such projection.
        kv_rank: width of the latent.
        plain_dim, rope_dim: widths of the two parts of a query or key head: the part without rotary
            embedding, and the rotated part.
        value_dim: width of a value head.
        interleaves: whether the two elements of a rotated pair are neighbours in the checkpoint. If
            false, element i forms a pair with element ``i + n / 2``, where n is the number of
            rotated elements.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleaves: bool

    @property
    def head_dim(self) -> int:
        """Width of a query head, with its rotated part."""
        return self.plain_dim + self.rope_dim

    @property
    def has_whole_heads(self) -> bool:
        """Whether the part of a key that is computed from the latent is joined with the rotated
        part. If false, the heads have sizes for which the operator accepts the two parts
        separately.
        """
        return self.head_dim == self.value_dim


@dataclass(frozen=True)
class RowRange:
    """Rows of a stored tensor that loaders read as a separate tensor.

    Attributes:
        part: a text that the usual name of the separate tensor contains.
        first, count, total: index of the first row, number of rows, and the stored tensor's number
            of rows.
    """

    part: str
    first: int
    count: int
    total: int


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The names of a checkpoint's tensors, if they differ from the usual names (the names that
    Llama and DeepSeek V3 use).

    Attributes:
        prefix: beginning of the names of all tensors of the decoder.
        changes: pairs (usual, stored): the text ``usual`` in a usual name is replaced by the text
            ``stored`` to get the name in the checkpoint. All pairs are applied, one after another.
        of_experts: pairs like ``changes``, which are applied only to tensors of routed experts.
        ranges: tensors that are rows of a stored tensor, such as the queries in one tensor of
            queries, keys and values.
        ignored: beginnings of the names of tensors that belong to other parts of the model, such as
            an image encoder.
    """

    prefix: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    of_experts: tuple[tuple[str, str], ...] = ()
    ranges: tuple[RowRange, ...] = ()
    ignored: tuple[str, ...] = ()

    def stored(self, name: str) -> str:
        """Return a tensor's name in the checkpoint; ``name`` is the tensor's usual name."""
        of_experts = self.of_experts if ".experts." in name else ()
        for usual, stored in (*self.changes, *of_experts):
            name = name.replace(usual, stored)
        return self.prefix + name

    def range_of(self, name: str) -> RowRange | None:
        """Return the rows of a stored tensor that form the tensor with this usual name; None if the
        checkpoint stores this tensor separately.
        """
        return next((each for each in self.ranges if each.part in name), None)


@dataclass(frozen=True)
class LayerRope:
    """A rotary embedding that only some layers have, and the indices of these layers."""

    rope: RopeSpec
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelFacts):
    """The shape of a supported decoder: the fields of ``ModelFacts``, and the fields that loaders
    need.

    Attributes:
        rotary_dim: number of elements at the beginning of each head that are rotated; None means
            all elements.
        rope_interleaves: whether the two elements of a rotated pair are neighbours in the
            checkpoint (for grouped queries and keys). If false, element i forms a pair with element
            ``i + n / 2``, where n is the number of rotated elements.
        has_output_gate: whether each element of the result of attention is multiplied by a gate.
        has_output_norms: whether the results of attention and of the MLP are normalised, before
            they are added to the residual stream.
        norm_adds_one: whether norms multiply by ``1 + weight``, except the norms in linear
            attention.
        int4: the matrices that have four bits in some or all layers.
        activation: activation of layers without experts; see ``Activation``.
        other_rope: rotary embedding of some layers, if it differs from ``rope``.
        norms_follow_rope: whether queries and keys are normalised after their rotation.
        has_input_norms: whether norms precede attention and the MLP.
        has_parallel_mlp: whether attention and the MLP have the same input, the result of one
            norm. Both results are added to the residual stream.
        norms_center: whether norms subtract the mean first (layer norms). Such norms of queries and
            keys have separate weights for each head.
        embedding_scale: factor by which the embeddings of tokens are multiplied.
        attention_scale: factor by which attention scores are multiplied; None means ``head_dim **
            -0.5``.
        residual_scale: factor by which the results of attention and of the feed-forward part are
            multiplied.
        logit_scale: factor by which logits are multiplied.
    """

    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    rope: RopeSpec
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    rotary_dim: int | None = None
    rope_interleaves: bool = False
    has_output_gate: bool = False
    has_output_norms: bool = False
    norm_adds_one: bool = False
    names: WeightNames = WeightNames()
    int4: tuple[Int4Matrix, ...] = ()
    activation: Activation = "silu"
    other_rope: LayerRope | None = None
    norms_follow_rope: bool = False
    has_input_norms: bool = True
    has_parallel_mlp: bool = False
    norms_center: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def gates_mlp(self) -> bool:
        """Whether layers without experts have a gate."""
        return self.activation not in ("relu2", "xielu")

    @property
    def num_layer_norms(self) -> int:
        """Number of norms of hidden states in a layer."""
        inputs = 2 - self.has_parallel_mlp if self.has_input_norms else 0
        return inputs + 2 * self.has_output_norms

    @property
    def num_rope_tables(self) -> int:
        """Number of cosine tables on a rank. The number of sine tables is the same."""
        if self.latent is not None:
            return 1
        return self.rope.num_tables + (self.other_rope.rope.num_tables if self.other_rope else 0)

    @property
    def paged_kind(self) -> LayerKind:
        """The kind of attention that keeps keys in blocks."""
        if self.indexer is not None:
            return "sparse"
        return "grouped" if self.latent is None else "latent"

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of attention of a layer. The layers of next-token modules come after the
        decoder's last layer.
        """
        if self.indexer is not None and layer not in self.indexer.layers:
            return "chosen"
        return "linear" if self.linear and layer in self.linear.layers else self.paged_kind
