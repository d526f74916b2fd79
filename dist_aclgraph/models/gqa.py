"""Grouped-query attention of a decoder. The details in which model families differ are fields of
``ModelSpec``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata, KVCache, PagedAttention
from dist_aclgraph.layers.context_parallel import ContextParallel
from dist_aclgraph.layers.head_norms import CenteredHeadNorms, HeadNorms, NormsOfAllHeads
from dist_aclgraph.layers.int8_rows import Rows
from dist_aclgraph.layers.linear import Product, RowParallelLinear
from dist_aclgraph.layers.norm import RmsNorm
from dist_aclgraph.layers.rotary import RopeRows, RotaryTableSet, pairs_across_head
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import MatrixPart, WeightSlices, part_by_part
from dist_aclgraph.shapes.heads import heads_per_rank, kv_heads_per_rank
from dist_aclgraph.shapes.model_spec import ModelSpec

Norms = HeadNorms | CenteredHeadNorms | NormsOfAllHeads


@dataclass(frozen=True)
class HeadShare:
    """The heads of a rank. If there are fewer KV heads than ranks, several ranks have the same KV
    head.
    """

    q: range
    kv: range

    @property
    def num_heads(self) -> int:
        return len(self.q)

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv)


def share_heads(spec: ModelSpec, group: CommGroup) -> HeadShare:
    """Split the heads over the tensor parallel group.

    Raises:
        ConfigError: the number of heads is not a multiple of the group size, or the number of KV
            heads is neither a multiple nor a divisor of the group size.
    """
    size = group.size
    num_heads = heads_per_rank(spec.num_heads, size, is_latent=False)
    num_kv_heads = kv_heads_per_rank(spec.num_kv_heads, size)
    first_kv_head = group.rank * spec.num_kv_heads // size
    first_head = group.rank * num_heads
    return HeadShare(
        range(first_head, first_head + num_heads),
        range(first_kv_head, first_kv_head + num_kv_heads),
    )


@dataclass(frozen=True)
class GroupedQueryAttention:
    """The attention of one layer on this rank.

    Attributes:
        qkv: product that computes q, then the gates of the results if ``has_gate`` is true, then k
            and v.
        rope_rows: indices of the rotary tables for queries and for keys; None if the layer rotates
            neither queries nor keys.
        norms_follow_rope: whether queries and keys are normalised after their rotation.
        has_gate: whether the results of attention are multiplied by ``sigmoid(gate)``, element by
            element.
    """

    qkv: Product
    norms: Norms | None
    paged: PagedAttention
    output_product: RowParallelLinear
    rope_rows: RopeRows | None
    norms_follow_rope: bool = False
    has_gate: bool = False

    @property
    def quantises_rows(self) -> bool:
        return self.qkv.quantises_rows

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Return q, k and v, [num_tokens, heads, head_dim] each, the gate [num_tokens, heads *
        head_dim] if there is one, and a tensor for the result.
        """
        a = self.paged
        num_q, num_kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        widths = [num_q, *[num_q] * self.has_gate, num_kv, num_kv]
        q, *gate, k, v = torch.split(self.qkv(h), widths, dim=-1)
        n = q.shape[0]
        q = q.reshape(1, n, a.num_heads, a.head_dim)
        k = k.reshape(1, n, a.num_kv_heads, a.head_dim)
        if self.norms is not None and not self.norms_follow_rope:
            q, k = self.norms(q, k)
        if self.rope_rows is not None:
            q, k = self.rope_rows.rotate(q, k, rope)
        if self.norms is not None and self.norms_follow_rope:
            q, k = self.norms(q, k)
        # Without norm and rotation, q and k are views of the results of ``qkv``, and not
        # contiguous.
        q, k = q[0].contiguous(), k[0].contiguous()
        # The cache write accepts only contiguous rows.
        v = v.reshape(n, a.num_kv_heads, a.head_dim).contiguous()
        return q, k, v, *gate, torch.empty_like(q)

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: KVCache,
        metadata: AttentionMetadata,
        earlier: None,
    ) -> None:
        q, k, v, *_, out = inputs
        self.paged(q, k, v, out, cache, metadata)

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        attended = inputs[-1].flatten(1)
        if self.has_gate:
            attended = attended * inputs[-2].sigmoid()
        return self.output_product(attended)


class GroupedQuery:
    """The data that all layers of this kind share: the rank's heads and the rotary tables."""

    slot_dtype = torch.int32
    takes_long_queries = True
    ropes_written = False
    reads_device_rows = False
    chooses_keys = False

    def __init__(
        self,
        spec: ModelSpec,
        groups: RankGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
    ) -> None:
        """Build the rotary tables for requests of up to ``max_len`` tokens.

        Raises:
            ConfigError: the heads cannot be split over the group.
        """
        self._spec = spec
        self._heads = share_heads(spec, groups.tp)
        self._window = spec.window_within(max_len)
        self._context = ContextParallel.of(groups)
        self._device = device
        self._rotary = RotaryTableSet(
            spec.head_dim, max_len, dtype, device, rotary_dim=spec.rotary_dim
        )
        self._rope_rows = self._rotary.add(spec.rope)
        other = spec.other_rope
        self._other_rows = None if other is None else self._rotary.add(other.rope)

    def load(self, slices: WeightSlices, index: int) -> GroupedQueryAttention:
        prefix, window = f"model.layers.{index}.self_attn", self._window
        spec, heads, d = self._spec, self._heads, self._spec.head_dim
        q = self._queries(slices, f"{prefix}.q_proj")
        k = self._matrix(slices, f"{prefix}.k_proj", spec.num_kv_heads, heads.kv)
        v = self._matrix(slices, f"{prefix}.v_proj", spec.num_kv_heads, heads.kv)
        if self._rearranges:
            k = k.rearranged(self._paired)
        return GroupedQueryAttention(
            qkv=slices.joined([q, k, v], spec.has_qkv_bias),
            norms=self._load_norms(slices, prefix) if spec.has_qk_norm else None,
            paged=PagedAttention(
                heads.num_heads,
                heads.num_kv_heads,
                d,
                self._context,
                window.num_keys if window and index in window.layers else None,
                self._load_sinks(slices, prefix) if spec.has_sinks else None,
                spec.attention_scale,
            ),
            output_product=slices.row_parallel(
                f"{prefix}.o_proj",
                (spec.hidden_size, spec.num_heads * d),
                heads.q.start * d,
                heads.q.stop * d,
                spec.has_output_bias,
            ),
            rope_rows=self._rows_of(index),
            norms_follow_rope=spec.norms_follow_rope,
            has_gate=spec.has_output_gate,
        )

    def _rows_of(self, index: int) -> RopeRows | None:
        other = self._spec.other_rope
        return self._other_rows if other and index in other.layers else self._rope_rows

    def _queries(self, slices: WeightSlices, name: str) -> MatrixPart:
        """Return the rows of a weight that compute the queries of this rank's heads, then the rows
        that compute the gates, if there are gates.

        A checkpoint with gates stores head after head: first the rows for a head's queries, then
        the rows for its gates.
        """
        spec, heads = self._spec, self._heads.q
        if not spec.has_output_gate:
            q = self._matrix(slices, name, spec.num_heads, heads)
            return q.rearranged(self._paired) if self._rearranges else q
        wide = range(2 * heads.start, 2 * heads.stop)
        return self._matrix(slices, name, 2 * spec.num_heads, wide).rearranged(self._gates_last)

    def _gates_last(self, outputs: Tensor) -> Tensor:
        d = self._spec.head_dim
        q, gates = part_by_part([d, d])(outputs).chunk(2, -1)
        return torch.cat([self._paired(q), gates], -1)

    def _matrix(self, slices: WeightSlices, name: str, num_heads: int, here: range) -> MatrixPart:
        """Return the part of an [out, in] weight that computes the heads in the range ``here``."""
        hidden, d = self._spec.hidden_size, self._spec.head_dim
        return slices.matrix(name, (num_heads * d, hidden), 0, here.start * d, here.stop * d)

    @property
    def _rearranges(self) -> bool:
        """Whether the order of a head's elements in the checkpoint differs from the order that the
        rotary tables need.
        """
        return self._spec.rotary_dim is not None or self._spec.rope_interleaves

    def _paired(self, heads: Tensor) -> Tensor:
        if not self._rearranges:
            return heads
        spec = self._spec
        dim, interleaves = spec.rotary_dim or spec.head_dim, spec.rope_interleaves
        return pairs_across_head(heads, spec.head_dim, dim, interleaves=interleaves)

    def _load_sinks(self, slices: WeightSlices, prefix: str) -> Tensor:
        heads = self._heads.q
        sinks = slices.part(f"{prefix}.sinks", (self._spec.num_heads,), 0, heads.start, heads.stop)
        # The operator needs sinks in bfloat16 even if the other tensors are float16.
        return slices.place(sinks.bfloat16() if sinks.dtype == torch.float16 else sinks)

    def _load_norms(self, slices: WeightSlices, prefix: str) -> Norms:
        spec, heads, one = self._spec, self._heads, range(1)

        def weight(name: str, num_heads: int, here: range) -> Tensor:
            d = spec.head_dim
            start, stop = here.start * d, here.stop * d
            part = slices.part(f"{prefix}.{name}.weight", (num_heads * d,), 0, start, stop)
            return slices.place(self._paired(part))

        if spec.norms_center:
            q, k = (
                self._head_weights(slices, f"{prefix}.{name}.weight", num_heads, here)
                for name, num_heads, here in (
                    ("q_norm", spec.num_heads, heads.q),
                    ("k_norm", spec.num_kv_heads, heads.kv),
                )
            )
            return CenteredHeadNorms(q, k, spec.rms_norm_eps)
        if not spec.qk_norm_spans_heads:
            norms = (weight("q_norm", 1, one), weight("k_norm", 1, one))
            eps, adds_one = spec.rms_norm_eps, spec.norm_adds_one
            return HeadNorms(*(RmsNorm(norm, eps, adds_one) for norm in norms))
        return NormsOfAllHeads(
            weight("q_norm", spec.num_heads, heads.q),
            weight("k_norm", spec.num_kv_heads, heads.kv),
            spec.rms_norm_eps,
            slices.group,
        )

    def _head_weights(self, slices: WeightSlices, name: str, num_heads: int, here: range) -> Tensor:
        """Return the rows of a [heads, head_dim] weight that belong to the heads in the range
        ``here``.
        """
        shape = num_heads, self._spec.head_dim
        return slices.place(
            self._paired(slices.part(name, shape, 0, here.start, here.stop).flatten()).view(
                -1, shape[1]
            )
        )

    def rope(self, positions: Tensor) -> Rope:
        """Return cos and sin of [n] positions, [tables, n, 1, head_dim] each."""
        return self._rotary.rows(positions)

    def make_cache(self, room: CacheRoom) -> KVCache:
        shape = (room.num_blocks, room.block_size, self._heads.num_kv_heads, self._spec.head_dim)
        # The cache is filled with zeros, because attention reads whole blocks, and a NaN after the
        # last key would spread.
        return KVCache(
            *(torch.zeros(shape, dtype=room.dtype, device=self._device) for _ in range(2))
        )
