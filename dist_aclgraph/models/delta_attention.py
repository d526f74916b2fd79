"""The common part of all forms of linear attention with the gated delta rule: the heads of a rank,
the states, and the computation of the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.delta_rule import rule_for
from dist_aclgraph.layers.gated_delta import GatedDelta, ShortConvolution
from dist_aclgraph.layers.linear import RowParallelLinear
from dist_aclgraph.layers.state_metadata import StateCache
from dist_aclgraph.models.attention_kind import CacheRoom, Rope
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.heads import linear_heads_per_rank
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ModelSpec


@dataclass(frozen=True)
class DeltaAttention:
    """The linear attention of one layer on this rank. Subclasses implement ``project`` and
    ``output`` of ``LayerAttention``.

    Attributes:
        norm: [value_dim], weight of the norm of the results.
    """

    delta: GatedDelta
    norm: Tensor
    output_product: RowParallelLinear
    eps: float

    def attend(
        self,
        inputs: tuple[Tensor, ...],
        rope: Rope,
        cache: StateCache,
        metadata: AttentionMetadata,
        earlier: None,
    ) -> None:
        qkv, g, beta, _, out = inputs
        if metadata.states is not None:
            self.delta(qkv, g, beta, out, cache, metadata.states)

    def room_for_results(self, x: Tensor) -> Tensor:
        """Return a tensor for the results, [n, heads, value_dim], of the type of ``x``."""
        return x.new_empty(x.shape[0], self.delta.num_value_heads, self.delta.value_dim)

    def normed(self, out: Tensor) -> Tensor:
        """Return the normalised results, [n, heads * value_dim]."""
        found: Tensor = torch.ops.npu.npu_rms_norm(out, self.norm, self.eps)[0]
        return found.flatten(1)


@dataclass(frozen=True)
class DeltaHeads:
    keys: range
    values: range

    @classmethod
    def of(cls, linear: LinearSpec, group: CommGroup) -> DeltaHeads:
        """Split the heads over the tensor parallel group.

        Raises:
            ConfigError: a number of heads is not a multiple of the group size.
        """
        counts = linear_heads_per_rank(linear.num_key_heads, linear.num_value_heads, group.size)
        return cls(*(range(group.rank * n, (group.rank + 1) * n) for n in counts))


class DeltaKind:
    """The data that all layers of one kind of linear attention share: the rank's heads and the
    rule.

    This class also loads the weights that all forms of linear attention have.
    """

    def __init__(
        self, spec: ModelSpec, groups: RankGroups, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Split the heads.

        Raises:
            ConfigError: the heads cannot be split over the group.
        """
        assert spec.linear is not None
        self._linear, self._hidden, self._eps = spec.linear, spec.hidden_size, spec.rms_norm_eps
        self._heads = DeltaHeads.of(spec.linear, groups.tp)
        self._device, self._dtype = device, dtype
        self._rule = rule_for(dtype, decays_by_channel=spec.linear.decays_by_channel)
        d = spec.linear.key_dim
        self._unit = torch.full((d,), d**-0.5, dtype=torch.float32, device=device)

    def make_cache(self, room: CacheRoom) -> StateCache:
        # Slot 0 must not contain NaN: padding reads and writes slot 0, so a NaN would never
        # disappear.
        linear, heads, device = self._linear, self._heads, self._device
        channels = 2 * len(heads.keys) * linear.key_dim + len(heads.values) * linear.value_dim
        conv = (room.num_slots, linear.conv_width - 1, channels)
        recurrent = (room.num_slots, len(heads.values), linear.value_dim, linear.key_dim)
        return StateCache(
            torch.zeros(conv, dtype=self._dtype, device=device),
            torch.zeros(recurrent, dtype=self._rule.state_dtype, device=device),
        )

    def _delta(self, slices: WeightSlices, convolution: list[Tensor]) -> GatedDelta:
        """Return the convolution and the rule of a layer.

        Args:
            convolution: the weights of this rank's channels, in tensors of the shape [channels, 1,
                width].
        """
        heads = self._heads
        weight = slices.place(torch.cat(convolution).squeeze(1).t().float())
        return GatedDelta(
            len(heads.keys),
            len(heads.values),
            self._linear.value_dim,
            ShortConvolution(weight),
            self._unit,
            self._rule,
        )

    def _output(self, slices: WeightSlices, name: str) -> RowParallelLinear:
        values, d = self._heads.values, self._linear.value_dim
        shape = (self._hidden, self._linear.num_value_heads * d)
        return slices.row_parallel(name, shape, values.start * d, values.stop * d, has_bias=False)
