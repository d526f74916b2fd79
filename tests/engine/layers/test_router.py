from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.layers.router import ExpertCopies, Router, Scoring
from dist_aclgraph.planning.expert_placement import place_experts


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_are_normalised_and_scaled(
    npu: Any, scoring: Scoring, renormalizes: bool, scale: float
) -> None:
    chance, slots = np.random.default_rng(0), np.zeros(6, np.int32)
    x, weight = (chance.normal(size=size).astype(np.float32) for size in ((6, 32), (32, 8)))
    router = Router(npu.upload(weight), 3, renormalizes, scoring, scale=scale)

    experts, weights = router(npu.upload(x), npu.upload(slots))

    logits = torch.from_numpy(x) @ torch.from_numpy(weight)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    best = scores.topk(3, -1)
    expected = best.values / best.values.sum(-1, keepdim=True) if renormalizes else best.values
    assert torch.equal(experts.cpu().long(), best.indices)
    torch.testing.assert_close(weights.cpu(), scale * expected)


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_tokens_use_the_copies_of_their_experts_in_turn(npu: Any, dp_rank: int) -> None:
    chance, placement = np.random.default_rng(0), place_experts(8, 3, 4)
    slots = np.array([0] * 6 + [PADDING_SLOT] * 2, np.int32)
    x, weight = (chance.normal(size=size).astype(np.float32) for size in ((8, 32), (32, 8)))
    x[1] = x[0]  # so that two successive tokens choose the same experts
    inputs = npu.upload(x), npu.upload(slots)
    table = npu.upload(placement.slot_table())

    experts, weights = Router(npu.upload(weight), 8, True)(*inputs)
    copies, same = Router(npu.upload(weight), 8, True, copies=ExpertCopies(table, dp_rank))(*inputs)

    flat = np.array([expert for rank in placement.ranks for expert in rank])
    assert np.array_equal(flat[copies.cpu().numpy()[:6]], experts.cpu().numpy()[:6])
    assert (copies.cpu().numpy()[6:] == placement.num_slots).all()
    assert torch.equal(weights.cpu(), same.cpu())
    has_copies = torch.tensor([len(placement.slots[e]) == 2 for e in experts.cpu()[0].tolist()])
    assert torch.equal(copies.cpu()[0] != copies.cpu()[1], has_copies)
    assert copies.cpu()[0, has_copies].tolist() == [
        placement.slots[e][dp_rank] for e in experts.cpu()[0, has_copies].tolist()
    ]
