"""Decoders with grouped-query attention: Llama, Qwen2, Qwen3 and Qwen3-MoE, one implementation with
the switches of ``ModelSpec``.

The forward pass is a chain of segments split at attention (``before_attention`` and
``after_attention`` of each layer), so that a graph can be captured for the whole or for the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.layers.attention import AttentionMetadata, KVCache, PagedAttention
from dist_aclgraph.layers.experts import ALL_HERE, ExpertLayer, ExpertStep
from dist_aclgraph.layers.linear import Linear, RowParallelLinear
from dist_aclgraph.layers.rotary import rope_tables
from dist_aclgraph.layers.vocabulary import (
    VocabularyEmbedding,
    VocabularyHead,
    vocabulary_part,
)
from dist_aclgraph.models.checkpoint import Checkpoint, Progress
from dist_aclgraph.models.expert_weights import load_experts
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.models.segments import RunSegment, Segment, run_directly
from dist_aclgraph.models.spec import ModelSpec


@dataclass(frozen=True)
class HeadShare:
    """Which heads a rank has. KV heads are replicated where there are fewer than ranks."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int


def share_heads(spec: ModelSpec, group: CommGroup) -> HeadShare:
    """Split the heads over the tensor parallel group.

    Raises:
        ConfigError: the group does not divide the heads, or they do not line up with KV heads.
    """
    size = group.size
    if spec.num_heads % size:
        raise ConfigError(
            f"parallel.tp is {size}: it must divide the model's {spec.num_heads} attention heads"
        )
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(
            f"parallel.tp is {size}: it must divide the model's {spec.num_kv_heads} KV heads or be "
            "a multiple of them"
        )
    num_heads = spec.num_heads // size
    num_kv_heads = max(1, spec.num_kv_heads // size)
    first_kv_head = group.rank * spec.num_kv_heads // size
    return HeadShare(num_heads, num_kv_heads, group.rank * num_heads, first_kv_head)


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part of a layer, split over the group by its inner width."""

    gate_up: Linear
    down: RowParallelLinear

    def __call__(self, x: Tensor, slots: Tensor, step: ExpertStep) -> Tensor:
        """[n, hidden] -> [n, hidden]; the other arguments are for layers of experts."""
        return self.down(torch.ops.npu.npu_swiglu(self.gate_up(x)))


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer of this rank."""

    input_norm: Tensor
    post_attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention: PagedAttention
    output: RowParallelLinear
    mlp: Mlp | ExpertLayer
    eps: float

    def before_attention(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k [num_tokens, heads, head_dim] rotated, v, room for what attention makes of
        them, and the residual stream.
        """
        npu, a = torch.ops.npu, self.attention
        if residual is None:
            h, residual = npu.npu_rms_norm(x, self.input_norm, self.eps)[0], x
        else:
            h, _, residual = npu.npu_add_rms_norm(x, residual, self.input_norm, self.eps)
        n = x.shape[0]
        widths = [a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim]
        q, k, v = torch.split(self.qkv(h), [widths[0], widths[1], widths[1]], dim=-1)
        q = q.reshape(1, n, a.num_heads, a.head_dim)
        k = k.reshape(1, n, a.num_kv_heads, a.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q = npu.npu_rms_norm(q, self.q_norm, self.eps)[0]
            k = npu.npu_rms_norm(k, self.k_norm, self.eps)[0]
        q = npu.npu_rotary_mul(q, cos, sin)[0]
        k = npu.npu_rotary_mul(k, cos, sin)[0]
        # The cache write takes contiguous rows only.
        v = v.reshape(n, a.num_kv_heads, a.head_dim).contiguous()
        return q, k, v, torch.empty_like(q), residual

    def after_attention(
        self, attended: Tensor, residual: Tensor, slots: Tensor, step: ExpertStep
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output before its residual sum, and the residual stream."""
        npu = torch.ops.npu
        h, _, residual = npu.npu_add_rms_norm(
            self.output(attended.flatten(1)), residual, self.post_attention_norm, self.eps
        )
        return self.mlp(h, slots, step), residual


class DenseDecoder:
    """A decoder's part on one tensor parallel rank.

    Owns the weights. Knows nothing about requests, batches or graphs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: RankGroups,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        max_len: int,
        progress: Progress | None = None,
    ) -> None:
        """Load this rank's slices.

        Raises:
            ConfigError: the heads cannot be split over the group.
            MissingTensorError: names the first tensor that lacks or has another shape.
        """
        self.spec = spec
        self.heads = share_heads(spec, groups.tp)
        slices = WeightSlices(checkpoint, groups.tp, device)
        loader = _Loader(spec, self.heads, slices)
        self.embedding = loader.embedding()
        self.layers = []
        for index in range(spec.num_layers):
            self.layers.append(loader.layer(index))
            if progress is not None:
                progress(index + 1, spec.num_layers)
        self.norm = slices.whole("model.norm.weight", (spec.hidden_size,))
        self.head = loader.head(self.embedding)
        dtype = self.norm.dtype
        cos, sin = rope_tables(spec.rope, spec.head_dim, max_len, dtype)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: list[KVCache],
        metadata: AttentionMetadata,
        run: RunSegment = run_directly,
        step: ExpertStep = ALL_HERE,
    ) -> Tensor:
        """Run all layers.

        Args:
            token_ids: [num_tokens] int32.
            positions: [num_tokens] int32.
            slots: [num_tokens] int32, -1 is padding.
            caches: one per layer.
            run: what becomes of each segment between two attentions: run now, captured, replayed.

        Returns:
            [num_tokens, hidden], normalised.
        """
        first, *between, last = self._segments(step)
        q, k, v, attended, residual, cos, sin = run(first, token_ids, positions)
        for layer, cache, segment in zip(self.layers, caches, [*between, last], strict=True):
            layer.attention(q, k, v, attended, cache, metadata)
            if segment is not last:
                q, k, v, attended, residual = run(segment, attended, residual, slots, cos, sin)
        (hidden,) = run(last, attended, residual, slots)
        return hidden

    def _segments(self, step: ExpertStep) -> list[Segment]:
        """The forward pass, cut at attention: one segment more than there are layers."""
        layers, shape = self.layers, (1, -1, 1, self.spec.head_dim)

        def first(token_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            # Gathered once from tables that were built at load; all layers share the rows.
            cos = self._cos.index_select(0, positions).view(shape)
            sin = self._sin.index_select(0, positions).view(shape)
            x = self.embedding(token_ids)
            return *layers[0].before_attention(x, None, cos, sin), cos, sin

        def between(above: DecoderLayer, below: DecoderLayer, *state: Tensor) -> tuple[Tensor, ...]:
            attended, residual, slots, cos, sin = state
            x, residual = above.after_attention(attended, residual, slots, step)
            return below.before_attention(x, residual, cos, sin)

        def last(attended: Tensor, residual: Tensor, slots: Tensor) -> tuple[Tensor]:
            x, residual = layers[-1].after_attention(attended, residual, slots, step)
            eps = self.spec.rms_norm_eps
            return (torch.ops.npu.npu_add_rms_norm(x, residual, self.norm, eps)[0],)

        middle = [partial(between, *pair) for pair in pairwise(layers)]
        return [first, *middle, last]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, hidden] -> [n, vocab], on every rank; written to ``out`` where one is given."""
        return self.head(hidden, out)


class _Loader:
    """Cuts one rank's weights out of a checkpoint with Hugging Face's names."""

    def __init__(self, spec: ModelSpec, heads: HeadShare, slices: WeightSlices) -> None:
        self._spec = spec
        self._heads = heads
        self._slices = slices

    def embedding(self) -> VocabularyEmbedding:
        spec, group = self._spec, self._slices.group
        start, stop = vocabulary_part(spec.vocab_size, group)
        shape = (spec.vocab_size, spec.hidden_size)
        rows = self._slices.part("model.embed_tokens.weight", shape, 0, start, stop)
        return VocabularyEmbedding(self._slices.place(rows), start, group)

    def head(self, embedding: VocabularyEmbedding) -> VocabularyHead:
        spec, group = self._spec, self._slices.group
        if spec.tie_word_embeddings:
            return VocabularyHead(embedding.weight.t(), spec.vocab_size, group)
        part = vocabulary_part(spec.vocab_size, group)
        weight = self._slices.columns("lm_head.weight", spec.vocab_size, spec.hidden_size, *part)
        return VocabularyHead(self._slices.place(weight), spec.vocab_size, group)

    def layer(self, index: int) -> DecoderLayer:
        spec, heads, slices = self._spec, self._heads, self._slices
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norm = (spec.hidden_size,)
        head_norm = (spec.head_dim,)
        d = spec.head_dim
        first, last = heads.first_head * d, (heads.first_head + heads.num_heads) * d
        return DecoderLayer(
            input_norm=slices.whole(f"{prefix}.input_layernorm.weight", norm),
            post_attention_norm=slices.whole(f"{prefix}.post_attention_layernorm.weight", norm),
            qkv=self._qkv(attention),
            q_norm=slices.whole(f"{attention}.q_norm.weight", head_norm)
            if spec.has_qk_norm
            else None,
            k_norm=slices.whole(f"{attention}.k_norm.weight", head_norm)
            if spec.has_qk_norm
            else None,
            attention=PagedAttention(heads.num_heads, heads.num_kv_heads, d),
            output=slices.row_parallel(
                f"{attention}.o_proj",
                (spec.hidden_size, spec.num_heads * d),
                first,
                last,
                spec.has_output_bias,
            ),
            mlp=self._mlp(index, mlp),
            eps=spec.rms_norm_eps,
        )

    def _mlp(self, index: int, prefix: str) -> Mlp | ExpertLayer:
        spec, slices = self._spec, self._slices
        hidden, width, has_bias = spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias
        if spec.experts is not None and index in spec.experts.layers:
            return load_experts(slices, spec.experts, hidden, prefix)
        share = slices.share(width)
        parts = [(f"{prefix}.{name}", width, *share) for name in ("gate_proj", "up_proj")]
        down = slices.row_parallel(f"{prefix}.down_proj", (hidden, width), *share, has_bias)
        return Mlp(slices.fused(parts, hidden, has_bias), down)

    def _qkv(self, prefix: str) -> Linear:
        spec, heads = self._spec, self._heads
        d = spec.head_dim
        kv = (spec.num_kv_heads * d, heads.first_kv_head * d)
        kv_stop = kv[1] + heads.num_kv_heads * d
        first = heads.first_head * d
        parts = [
            (f"{prefix}.q_proj", spec.num_heads * d, first, first + heads.num_heads * d),
            (f"{prefix}.k_proj", *kv, kv_stop),
            (f"{prefix}.v_proj", *kv, kv_stop),
        ]
        return self._slices.fused(parts, spec.hidden_size, spec.has_qkv_bias)
