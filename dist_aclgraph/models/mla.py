"""Multi-head latent attention of a decoder (DeepSeek V2 and V3): the products, norms and weights
around the computation of ``layers/latent_attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.context_parallel import ContextParallel
from dist_aclgraph.layers.int8_latents import Int8LatentAttention, Int8LatentCache
from dist_aclgraph.layers.int8_rows import Int8Rows, Rows, quantised
from dist_aclgraph.layers.latent_attention import NORM_EPS, LatentAttention, LatentCache
from dist_aclgraph.layers.latent_prologue import HEADS, SIZES, LatentPrologue
from dist_aclgraph.layers.linear import Product, RowParallelLinear
from dist_aclgraph.layers.rotary import RotaryTables, score_factor
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import MatrixPart, WeightSlices
from dist_aclgraph.shapes.heads import heads_per_rank
from dist_aclgraph.shapes.int8_latents import int8_row_bytes
from dist_aclgraph.shapes.model_spec import LatentSpec, ModelSpec


def share_latent_heads(num_heads: int, group: CommGroup, *, pads_heads: bool = True) -> range:
    """Return this rank's heads.

    Args:
        pads_heads: whether attention may add heads of zeros, so that the operator accepts the
            number of heads.

    Raises:
        ConfigError: the number of heads is not a multiple of the group size, or the attention
            operator does not support the number of heads on a rank.
    """
    count = heads_per_rank(num_heads, group.size, is_latent=True, pads_heads=pads_heads)
    return range(group.rank * count, (group.rank + 1) * count)


@dataclass(frozen=True)
class MultiHeadLatentAttention:
    """The attention of one layer on this rank.

    Attributes:
        down: one product; two products if ``prologue`` is set. From the hidden states, ``down``
            computes the latents of queries [q_rank], the latent [512], and the rotated part of the
            key [64]. If the model has no latents of queries, ``down`` computes the queries.
        q_norm: [q_rank], weight of the norm of the queries' latents; None if ``down`` computes the
            queries.
        q_up: product that computes the queries from their latents: q_rank -> heads * 192; None if
            ``down`` computes the queries.
        prologue: one operator that computes all inputs of attention. It runs in steps in which all
            tokens attend directly to the cache. None if all steps use separate operators.
    """

    down: tuple[Product, ...]
    q_norm: Tensor | None
    q_up: Product | None
    latent: LatentAttention
    output_product: RowParallelLinear
    sizes: LatentSpec
    prologue: LatentPrologue | None = None

    @property
    def quantises_rows(self) -> bool:
        return all(product.quantises_rows for product in self.down)

    def project(
        self, h: Rows, rope: Rope, metadata: AttentionMetadata | None
    ) -> tuple[Tensor, ...]:
        """Return q [n, heads, 128], the rotated part of q [n, heads, 64], kv [n, 576], and an empty
        tensor for the result. If ``attend`` will run the prologue, return the prologue's int8 input
        rows in place of q and kv.
        """
        npu, sizes, heads = torch.ops.npu, self.sizes, self.latent.num_heads
        if self.prologue is not None:
            h = quantised(h)
            if metadata is not None and metadata.attends_directly:
                out = self.latent.keys.new_empty((len(h.values), heads, sizes.value_dim))
                return h.values, h.scales, out
        x = [product(h) for product in self.down]
        n = len(x[0])
        width = sizes.kv_rank + sizes.rope_dim
        q, kv = x if len(x) > 1 else torch.split(x[0], [x[0].shape[1] - width, width], dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(npu.npu_rms_norm(q, self.q_norm, NORM_EPS)[0])
        q = q.view(n, heads, -1)
        q, q_rope = torch.split(q, [sizes.plain_dim, sizes.rope_dim], dim=-1)
        q_rope = npu.npu_interleave_rope(q_rope.unsqueeze(2).contiguous(), *rope).squeeze(2)
        out = q.new_empty((n, heads, sizes.value_dim))
        return q.contiguous(), q_rope, kv.contiguous(), out

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: LatentCache | Int8LatentCache,
        metadata: AttentionMetadata,
        earlier: Tensor | None,
    ) -> Tensor | None:
        if self.prologue is None or not _has_int8_rows(inputs):
            q, q_rope, kv, out = inputs
            return self.latent(q, q_rope, kv, out, rope, cache, metadata, earlier)
        if not metadata.is_idle:
            assert isinstance(cache, LatentCache)
            values, scales, out = inputs
            rows = Int8Rows(values, scales, out.dtype)
            queries = self.prologue(rows, rope, cache, metadata.written)
            n = metadata.num_direct
            self.latent.attend_directly(*queries, out[:n], cache, metadata)
        return None

    def output(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self.output_product(inputs[-1].flatten(1))


def _has_int8_rows(inputs: tuple[Tensor, ...]) -> bool:
    """Return whether ``inputs``, the inputs of ``attend``, are int8 rows for the prologue. If
    false, ``inputs`` are the results of separate operators.
    """
    return inputs[0].dtype == torch.int8


class LatentKind:
    """The data that all layers of latent attention share: the rank's heads and the rotary tables.

    This class also reads the weights that all forms of latent attention have.
    """

    slot_dtype = torch.int64
    ropes_written = True

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
        assert spec.latent is not None
        self._spec, self._sizes = spec, spec.latent
        pads_heads = spec.indexer is None
        self._heads = share_latent_heads(spec.num_heads, groups.tp, pads_heads=pads_heads)
        self._context = ContextParallel.of(groups)
        self._device = device
        self._rotary = RotaryTables(spec.rope, self._sizes.rope_dim, max_len, dtype, device)

    def rope(self, positions: Tensor) -> Rope:
        """Return cos and sin of [n] positions, [n, 1, 1, 64] each."""
        return self._rotary.rows(positions, (-1, 1, 1, self._sizes.rope_dim))

    @property
    def _scale(self) -> float:
        width = self._sizes.plain_dim + self._sizes.rope_dim
        return float(width**-0.5 * score_factor(self._spec.rope))

    def _key_values(self, slices: WeightSlices, prefix: str) -> MatrixPart:
        """Return the matrix that computes the latent and the rotated part of the key, [hidden, 512
        + 64].
        """
        width = self._sizes.kv_rank + self._sizes.rope_dim
        shape = (width, self._spec.hidden_size)
        matrix = slices.matrix(f"{prefix}.kv_a_proj_with_mqa", shape, 0, 0, width)
        return matrix.rearranged(lambda columns: self._paired(columns, width))

    def _output(self, slices: WeightSlices, prefix: str) -> RowParallelLinear:
        d, heads = self._sizes.value_dim, self._heads
        shape = (self._spec.hidden_size, self._spec.num_heads * d)
        return slices.row_parallel(
            f"{prefix}.o_proj", shape, heads.start * d, heads.stop * d, has_bias=False
        )

    def _queries(self, slices: WeightSlices, name: str, width: int) -> MatrixPart:
        """Return the query matrix of this rank's heads, [width, heads * 192]."""
        d = self._sizes.plain_dim + self._sizes.rope_dim
        out, first, last = self._spec.num_heads * d, self._heads.start * d, self._heads.stop * d
        matrix = slices.matrix(name, (out, width), 0, first, last)
        return matrix.rearranged(lambda columns: self._paired(columns, d))

    def _paired(self, weight: Tensor, width: int) -> Tensor:
        """Reorder columns, so that two columns that are rotated as a pair are neighbours.

        In each group of ``width`` columns, the last ``rope_dim`` columns are rotated.
        """
        if self._sizes.interleaves:
            return weight
        dim = self._sizes.rope_dim
        heads = weight.reshape(len(weight), -1, width)
        plain, halves = torch.split(heads, [width - dim, dim], dim=-1)
        pairs = halves.reshape(*halves.shape[:-1], 2, dim // 2).transpose(-1, -2).flatten(-2)
        return torch.cat([plain, pairs], dim=-1).flatten(1)

    def _up(self, slices: WeightSlices, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weight of the latent's norm, the matrices that compute each head's keys, and
        the matrices that compute each head's values, [heads, d, 512] each.
        """
        sizes, heads = self._sizes, self._heads
        d = sizes.plain_dim + sizes.value_dim
        out = self._spec.num_heads * d
        up = slices.part(
            f"{prefix}.kv_b_proj.weight", (out, sizes.kv_rank), 0, heads.start * d, heads.stop * d
        ).view(len(heads), d, sizes.kv_rank)
        keys, values = torch.split(up, [sizes.plain_dim, sizes.value_dim], dim=1)
        norm = slices.whole(f"{prefix}.kv_a_layernorm.weight", (sizes.kv_rank,))
        return norm, slices.place(keys), slices.place(values)

    def _int8_rows(self, room: CacheRoom) -> Tensor:
        """Return the tensor of cache rows that contain latents in int8."""
        width = int8_row_bytes(self._sizes.kv_rank + self._sizes.rope_dim, room.dtype.itemsize)
        return self._zeros(replace(room, dtype=torch.int8), width)

    def _zeros(self, room: CacheRoom, width: int) -> Tensor:
        """Return a cache tensor of zeros. Some operators read whole blocks, so a NaN after the last
        key would spread.
        """
        shape = (room.num_blocks, room.block_size, 1, width)
        return torch.zeros(shape, dtype=room.dtype, device=self._device)


class MultiHeadLatent(LatentKind):
    """Latent attention to all keys that a query may see."""

    # for direct attention, the operator accepts only few queries of a request
    takes_long_queries = False
    reads_device_rows = False
    chooses_keys = False
    _attention: type[LatentAttention] = LatentAttention

    def load(self, slices: WeightSlices, index: int) -> MultiHeadLatentAttention:
        prefix, rank = f"model.layers.{index}.self_attn", self._sizes.q_rank
        hidden = self._spec.hidden_size
        key_values = self._key_values(slices, prefix)
        norm, keys, values = self._up(slices, prefix)
        q_norm, q_up, fits = None, None, False
        if rank is None:
            queries = self._queries(slices, f"{prefix}.q_proj", hidden)
        else:
            queries = slices.matrix(f"{prefix}.q_a_proj", (rank, hidden), 0, 0, rank)
            q_norm = slices.whole(f"{prefix}.q_a_layernorm.weight", (rank,))
            up = self._queries(slices, f"{prefix}.q_b_proj", rank)
            q_up = slices.product([up])
            fits = self._suits_prologue(slices, [queries, key_values, up])
        parts = [[queries], [key_values]] if fits else [[queries, key_values]]
        down = tuple(slices.product(matrices) for matrices in parts)
        prologue = None
        if fits and q_up is not None and q_norm is not None:
            prologue = LatentPrologue.of(down, q_up, q_norm, norm, keys)
        return MultiHeadLatentAttention(
            down=down,
            q_norm=q_norm,
            q_up=q_up,
            latent=self._attention(
                norm, keys, values, self._scale, self._context, self._sizes.has_whole_heads
            ),
            output_product=self._output(slices, prefix),
            sizes=self._sizes,
            prologue=prologue,
        )

    def _suits_prologue(self, slices: WeightSlices, matrices: list[MatrixPart]) -> bool:
        sizes = self._sizes
        return (
            (sizes.q_rank, sizes.kv_rank, sizes.rope_dim, sizes.plain_dim) == SIZES
            and len(self._heads) in HEADS
            and self._context.dcp.size == self._context.pcp.size == 1
            and slices.are_int8(matrices)
            and slices.fusions.use("latent_prologue", self._spec.hidden_size)
        )

    def make_cache(self, room: CacheRoom) -> LatentCache | Int8LatentCache:
        sizes = self._sizes
        return LatentCache(self._zeros(room, sizes.kv_rank), self._zeros(room, sizes.rope_dim))


class Int8Latent(MultiHeadLatent):
    """Latent attention to all keys that a query may see, with latents stored in int8."""

    reads_device_rows = True
    _attention = Int8LatentAttention

    def make_cache(self, room: CacheRoom) -> Int8LatentCache:
        return Int8LatentCache(self._int8_rows(room))

    def _suits_prologue(self, slices: WeightSlices, matrices: list[MatrixPart]) -> bool:
        return False  # the prologue can write latents only in floats
