"""The kinds of attention in a decoder: one object for each kind that at least one layer has."""

from __future__ import annotations

import torch

from dist_aclgraph.comm.groups import RankGroups
from dist_aclgraph.models.attention_kind import AttentionKind, PagedKind
from dist_aclgraph.models.gated_delta import GatedDeltaKind
from dist_aclgraph.models.gqa import GroupedQuery
from dist_aclgraph.models.kimi_delta import KimiDelta
from dist_aclgraph.models.mla import Int8Latent, MultiHeadLatent
from dist_aclgraph.models.sparse_mla import ChosenLatent, SparseLatent
from dist_aclgraph.shapes.model_spec import LayerKind, ModelSpec

PAGED: dict[LayerKind, type[GroupedQuery | MultiHeadLatent | SparseLatent]] = {
    "grouped": GroupedQuery,
    "latent": MultiHeadLatent,
    "sparse": SparseLatent,
}


class AttentionKinds:
    """Owns the objects that the layers of each kind share.

    Attributes:
        paged: the kind that keeps keys in blocks. A decoder has exactly one such kind. Layers that
            use the keys chosen by an earlier layer have a variant of this kind.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: RankGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
        int8_latents: bool = False,
    ) -> None:
        """Make an object for each kind that at least one layer has.

        Args:
            int8_latents: whether caches store latents in int8.

        Raises:
            ConfigError: the heads cannot be split over the group.
        """
        self._spec = spec
        paged = PAGED[spec.paged_kind]
        if int8_latents and paged is MultiHeadLatent:
            paged = Int8Latent
        self.paged: PagedKind = paged(spec, groups, device=device, dtype=dtype, max_len=max_len)
        self._made: dict[LayerKind, AttentionKind] = {spec.paged_kind: self.paged}
        if isinstance(self.paged, SparseLatent):
            self._made["chosen"] = ChosenLatent(self.paged)
        if spec.linear is not None:
            delta_kind = KimiDelta if spec.linear.decays_by_channel else GatedDeltaKind
            self._made["linear"] = delta_kind(spec, groups, device=device, dtype=dtype)

    def of(self, layer: int) -> AttentionKind:
        """Return the kind of attention of the layer with the index ``layer``. The index after the
        last layer's index means the layer of the next-token module.
        """
        return self._made[self._spec.kind_of(layer)]
