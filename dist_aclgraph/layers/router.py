"""The experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dist_aclgraph.context.shards import PADDING_SLOT

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
# The names of npu_moe_gating_top_k.
NORM_TYPES: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}
GROUP_SELECT_MODES: dict[GroupScore, int] = {"max": 0, "top2": 1}


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token by ``npu_moe_gating_top_k``.

    Softmax scores (Qwen3, DeepSeek V2) and sigmoid scores (DeepSeek V3) are used directly, or
    divided by their sum, and scaled after that.

    Attributes:
        weight: [hidden, num_experts] float32: rounding must not decide between near experts.
        top_k: experts of a token.
        renormalizes: whether the weights of a token sum to one, before they are scaled.
        bias: [num_experts] float32, added to scores for the choice only.
        num_groups, top_groups: groups of experts, and how many of them a token may choose from.
        group_score: the score by which groups are compared: their best score or the sum of their
            best two.
        scale: factor of all weights.
    """

    weight: Tensor
    top_k: int
    renormalizes: bool
    scoring: Scoring = "softmax"
    bias: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    scale: float = 1.0

    def __call__(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return experts [n, top_k] int32 and weights [n, top_k] float32.

        Padding goes to the id behind the last expert. Operators know this id, and no rank has it.
        (Negative ids are not allowed, and on CANN 9 they hide all others.)

        Args:
            x: [n, hidden].
            slots: [n] int32, ``PADDING_SLOT`` is padding.
        """
        logits = torch.mm(x.float(), self.weight)
        weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            k=self.top_k,
            bias=self.bias,
            k_group=self.top_groups,
            group_count=self.num_groups,
            group_select_mode=GROUP_SELECT_MODES[self.group_score],
            norm_type=NORM_TYPES[self.scoring],
            routed_scaling_factor=self.scale,
        )
        if self.scoring == "softmax" and self.renormalizes:
            weights = weights * (self.scale / weights.sum(-1, keepdim=True))
        if self.scoring == "sigmoid" and not self.renormalizes:
            # The operator divides sigmoid scores by their sum in any case.
            weights = logits.sigmoid().gather(1, experts.long()) * self.scale
        nowhere = self.weight.shape[1]
        return experts.masked_fill((slots == PADDING_SLOT).unsqueeze(1), nowhere), weights
