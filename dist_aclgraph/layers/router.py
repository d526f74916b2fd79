"""Chooses the experts of each token, and the weights of these experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dist_aclgraph.context.shards import PADDING_SLOT

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
# Codes of npu_moe_gating_top_k. A code selects the function that computes scores.
NORM_TYPES: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}
GROUP_SELECT_MODES: dict[GroupScore, int] = {"max": 0, "top2": 1}


@dataclass(frozen=True)
class ExpertCopies:
    """Chooses, for each token and each of its experts, one copy of the expert.

    Neighbouring tokens get different copies. The first tokens of neighbouring data-parallel ranks
    get different copies. All ranks of a tensor parallel group choose the same copy for a token.

    Attributes:
        slots: [num_experts + 1, maximum number of copies] int32; see
            ``ExpertPlacement.slot_table``.
        dp_rank: data-parallel rank of the tokens.
    """

    slots: Tensor
    dp_rank: int

    def __call__(self, experts: Tensor) -> Tensor:
        """Return the slot of the chosen copy of each expert. Argument and result are [n, top_k]
        int32.
        """
        (n, top_k), width = experts.shape, self.slots.shape[1]
        tokens = torch.arange(
            self.dp_rank, self.dp_rank + n, dtype=torch.int32, device=experts.device
        )
        index = experts * width + tokens.fmod(width).unsqueeze(1)
        return self.slots.flatten().index_select(0, index.flatten()).view(n, top_k)


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token by ``npu_moe_gating_top_k``.

    Scores are softmax values (Qwen3, DeepSeek V2) or sigmoid values (DeepSeek V3). A token's weight
    for an expert is the expert's score. If ``renormalizes`` is true, the weights are divided by
    their sum. In any case, the weights are then multiplied by ``scale``.

    Attributes:
        weight: [hidden, num_experts]; float32, so that rounding does not change the chosen experts.
        top_k: number of experts that each token chooses.
        renormalizes: whether the weights of a token's experts are divided by their sum.
        bias: [num_experts] float32, added to the scores when experts are chosen. The weights do not
            contain this bias.
        top_groups: number of groups that a token may use. A token chooses its experts only from the
            groups with the best scores.
        group_score: the rule for the score of a group: "max" is the best score of the group's
            experts, "top2" is the sum of their two best scores.
        scale: factor by which all weights are multiplied.
        copies: chooses a copy of each expert; None if every expert exists only once.
        logit_bias: [num_experts] float32, added to the logits.
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
    copies: ExpertCopies | None = None
    logit_bias: Tensor | None = None

    def __call__(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of each token's experts, [n, top_k] int32, and their weights, [n, top_k]
        float32.

        If experts have copies, each id is the slot of the chosen copy in ``ExpertPlacement``. For
        padding tokens, all ids are one above the last expert's id. Operators accept this id, and no
        rank has an expert with this id. (With a negative id, CANN 9's ``npu_moe_init_routing_v2``
        could return the number of rows 0 for all experts.)

        Args:
            x: [n, hidden].
            slots: [n] int32; ``PADDING_SLOT`` marks padding.
        """
        logits = self._logits(x.float())
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
            # The operator always divides sigmoid scores by their sum. Weights without this division
            # are computed here.
            weights = logits.sigmoid().gather(1, experts.long()) * self.scale
        nowhere = self.weight.shape[1]
        experts = experts.masked_fill((slots == PADDING_SLOT).unsqueeze(1), nowhere)
        return experts if self.copies is None else self.copies(experts), weights

    def _logits(self, x: Tensor) -> Tensor:
        if self.logit_bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.logit_bias, x, self.weight)
