"""The router is compared with its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.layers.router import Router, Scoring


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
