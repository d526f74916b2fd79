"""A sequence of decoder layers, each with any kind of attention.

The forward pass is a sequence of segments, with attention between two segments
(``before_attention`` and ``after_attention`` of each layer). So one graph can contain the whole
pass, or each graph can contain one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import softplus

from dist_aclgraph.comm.collective_place import AFTER, BEFORE, HEAD, INSIDE
from dist_aclgraph.comm.marks import CollectiveMarks
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ALL_HERE, ExpertStep
from dist_aclgraph.layers.int8_rows import Int8Norm, Rows
from dist_aclgraph.layers.linear import Product, RowParallelLinear
from dist_aclgraph.layers.local_experts import XIELU_BETA, Activation, Xielu, swiglu
from dist_aclgraph.layers.norm import CenteredNorm, NoNorm, Norm, RmsNorm
from dist_aclgraph.layers.segments import RunSegment, Segment, run_directly
from dist_aclgraph.models.attention_kind import AttentionKind, Cache, LayerAttention, Rope
from dist_aclgraph.models.expert_weights import load_experts
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.model_spec import ModelSpec

# The possible norms of the input of attention, and of the input of the feed-forward part.
InputNorm = Norm | NoNorm | Int8Norm
MakeRope = Callable[[Tensor], Rope]  # maps positions to rotary rows
# A function that computes the first layer's input, [num_tokens, hidden], from tensors that have one
# row for each token.
Embed = Callable[..., Tensor]


class FeedForward(Protocol):
    """The part of a layer that comes after attention: an MLP or a layer of experts."""

    @property
    def quantises_rows(self) -> bool:
        """Whether all products that read the input are int8 products."""

    def __call__(self, x: Rows, slots: Tensor, step: ExpertStep) -> Tensor:
        """Map [n, hidden] to [n, hidden], summed over the ranks."""


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a layer without experts. Its inner width is split over the tensor
    parallel group.

    Attributes:
        activate: maps the result of ``gate_up`` to the input of ``down``.
    """

    gate_up: Product
    down: RowParallelLinear
    activate: Activation = swiglu

    @property
    def quantises_rows(self) -> bool:
        return self.gate_up.quantises_rows

    def __call__(self, x: Rows, slots: Tensor, step: ExpertStep) -> Tensor:
        """Map [n, hidden] to [n, hidden], summed over the ranks. ``slots`` and ``step`` are not
        used; layers of experts need them.
        """
        return self.down(self.activate(self.gate_up(x)))


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer of this rank.

    Attributes:
        post_attention_norm: norm of the feed-forward part's input; None if attention and the
            feed-forward part have the same input.
        index: the layer's index in the checkpoint.
        marks: object that records which collective the rank's device has reached.
        output_norms: two norms, one for the results of attention, one for the results of the
            feed-forward part; None if the results are added to the residual stream without a norm.
        result_scale: factor by which the results of attention and of the feed-forward part are
            multiplied.
    """

    input_norm: InputNorm
    attention: LayerAttention
    post_attention_norm: InputNorm | None
    feed_forward: FeedForward
    index: int
    marks: CollectiveMarks
    output_norms: tuple[Norm, Norm] | None = None
    result_scale: float = 1.0

    def before_attention(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: Rope,
        metadata: AttentionMetadata | None,
    ) -> tuple[Tensor, ...]:
        """Return the residual stream, followed by the inputs of attention.

        Args:
            metadata: the metadata of the step; None in piecewise graphs.
        """
        self.marks.enter(self.index, BEFORE)
        h: Rows
        if residual is None:
            assert not isinstance(self.input_norm, Int8Norm), "the first norm has no sum"
            h, residual = self.input_norm(x), x
        else:
            h, residual = self.input_norm.after_sum(x, residual)
        return residual, *self.attention.project(h, rope, metadata)

    def after_attention(
        self, attended: tuple[Tensor, ...], residual: Tensor, slots: Tensor, step: ExpertStep
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors: the result of the layer's feed-forward part, and the residual stream.
        The result is not yet added to the residual stream.

        Args:
            attended: the inputs of attention. The last of these tensors contains the results of
                attention.
        """
        self.marks.enter(self.index, AFTER)
        norms = self.output_norms or (None, None)
        result = self._result(self.attention.output(attended), norms[0])
        if self.post_attention_norm is None:
            # The norm is computed a second time, so that the previous segment need not return its
            # result.
            assert not isinstance(self.input_norm, Int8Norm)
            h: Rows = self.input_norm(residual)
            both = result + self._result(self.feed_forward(h, slots, step), norms[1])
            return both, residual
        h, residual = self.post_attention_norm.after_sum(result, residual)
        return self._result(self.feed_forward(h, slots, step), norms[1]), residual

    def _result(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return the tensor that is added to the residual stream. This tensor is the result ``x``
        of a part of the layer, normalised if ``norm`` is not None, and multiplied by
        ``result_scale``.
        """
        x = x if norm is None else norm(x)
        return x if self.result_scale == 1 else x * self.result_scale


def load_layer(
    slices: WeightSlices, spec: ModelSpec, kind: AttentionKind, index: int
) -> DecoderLayer:
    """Return this rank's part of the layer with the index ``index``. The index after the last
    layer's index means the layer of the next-token module.
    """
    prefix = f"model.layers.{index}"
    input_norm = _load_input_norm(slices, spec, f"{prefix}.input_layernorm.weight")
    attention = kind.load(slices, index)
    norm = None
    if not spec.has_parallel_mlp:
        norm = _load_input_norm(slices, spec, f"{prefix}.post_attention_layernorm.weight")
    feed_forward = _load_feed_forward(slices, spec, index, f"{prefix}.mlp")
    output_norms = None
    if spec.has_output_norms:
        output_norms = (
            load_norm(slices, spec, f"{prefix}.post_self_attn_layernorm.weight"),
            load_norm(slices, spec, f"{prefix}.post_mlp_layernorm.weight"),
        )
    is_first = index in (0, spec.num_layers)  # first layer of the decoder or next-token module
    # An ``Int8Norm`` always adds a residual stream. The first layer has no residual stream to add.
    # A norm that attention and the feed-forward part share must not add it in ``after_attention``.
    fuses_input = attention.quantises_rows and not is_first and norm is not None
    return DecoderLayer(
        slices.norm_before(input_norm, fuses_input),
        attention,
        None if norm is None else slices.norm_before(norm, feed_forward.quantises_rows),
        feed_forward,
        index,
        slices.group.marks,
        output_norms,
        spec.residual_scale,
    )


def _load_input_norm(slices: WeightSlices, spec: ModelSpec, name: str) -> Norm | NoNorm:
    return load_norm(slices, spec, name) if spec.has_input_norms else NoNorm()


def load_norm(slices: WeightSlices, spec: ModelSpec, name: str) -> Norm:
    """Return a norm of hidden states. The weight of the norm has the name ``name``."""
    weight = slices.whole(name, (spec.hidden_size,))
    if spec.norms_center:
        return CenteredNorm(weight, spec.rms_norm_eps)
    return RmsNorm(weight, spec.rms_norm_eps, spec.norm_adds_one)


def _load_feed_forward(
    slices: WeightSlices, spec: ModelSpec, index: int, prefix: str
) -> FeedForward:
    hidden, width, has_bias = spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias
    if spec.experts is not None and index in spec.experts.layers:
        return load_experts(slices, spec.experts, hidden, prefix)
    share = slices.share(width)
    names = ("gate_proj", "up_proj") if spec.gates_mlp else ("up_proj",)
    parts = [(f"{prefix}.{name}", width, *share) for name in names]
    down = slices.row_parallel(f"{prefix}.down_proj", (hidden, width), *share, has_bias)
    if spec.activation == "xielu":
        activation: Activation = _load_xielu(slices, f"{prefix}.act_fn")
    else:
        activation = slices.activation(down.product, spec.activation)
    return Mlp(slices.fused(parts, hidden, has_bias), down, activation)


def _load_xielu(slices: WeightSlices, prefix: str) -> Xielu:
    stored = (slices.checkpoint.read_float32(f"{prefix}.alpha_{sign}", (1,)) for sign in "pn")
    positive, negative = (softplus(alpha).item() for alpha in stored)
    return Xielu(positive, XIELU_BETA + negative)


@dataclass(frozen=True)
class LayerStack:
    """A sequence of layers, followed by a norm.

    Attributes:
        rope: returns the rows of cos and sin for positions; all layers use the same rows.
    """

    rope: MakeRope
    layers: Sequence[DecoderLayer]
    norm: Norm

    def forward(
        self,
        embed: Embed,
        inputs: tuple[Tensor, ...],
        positions: Tensor,
        slots: Tensor,
        caches: Sequence[Cache],
        metadata: AttentionMetadata,
        run: RunSegment = run_directly,
        step: ExpertStep = ALL_HERE,
    ) -> Tensor:
        """Run all layers.

        Args:
            embed: computes the first layer's input from ``inputs``, as a part of the first segment.
            inputs: [num_tokens, ...] each.
            positions: [num_tokens] int32.
            slots: [num_tokens] int32, slots of the tokens; padding tokens have ``PADDING_SLOT``.
            caches: one cache for each layer.
            run: runs, captures or replays a segment.

        Returns:
            The normalised hidden states, [num_tokens, hidden].
        """
        marks = self.layers[0].marks
        marks.begin_pass(self.layers[0].index)
        known = None if metadata.is_in_pieces else metadata
        first, *between, last = self._segments(embed, step, known)
        cos, sin, residual, *state = run(first, positions, *inputs)
        earlier: Any = None
        for layer, cache, segment in zip(self.layers, caches, [*between, last], strict=True):
            marks.enter(layer.index, INSIDE)
            attention = layer.attention
            earlier = attention.attend(tuple(state), (cos, sin), cache, metadata, earlier)
            if segment is not last:
                residual, *state = run(segment, residual, slots, cos, sin, *state)
        (hidden,) = run(last, residual, slots, *state)
        marks.enter(HEAD, BEFORE)
        return hidden

    def _segments(
        self, embed: Embed, step: ExpertStep, metadata: AttentionMetadata | None
    ) -> list[Segment]:
        """Return the segments of the forward pass: one segment more than there are layers."""
        layers = self.layers

        def first(positions: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            rope = self.rope(positions)
            return *rope, *layers[0].before_attention(embed(*inputs), None, rope, metadata)

        def between(above: DecoderLayer, below: DecoderLayer, *state: Tensor) -> tuple[Tensor, ...]:
            residual, slots, cos, sin, *attended = state
            x, residual = above.after_attention(tuple(attended), residual, slots, step)
            return below.before_attention(x, residual, (cos, sin), metadata)

        def last(residual: Tensor, slots: Tensor, *attended: Tensor) -> tuple[Tensor]:
            x, residual = layers[-1].after_attention(attended, residual, slots, step)
            return (self.norm.after_sum(x, residual)[0],)

        middle = [partial(between, *pair) for pair in pairwise(layers)]
        return [first, *middle, last]
