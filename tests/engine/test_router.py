"""The router against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dist_aclgraph.layers.router import Router


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_softmax_weights_are_normalised_and_scaled(
    npu: Any, renormalizes: bool, scale: float
) -> None:
    chance, slots = np.random.default_rng(0), np.zeros(6, np.int32)
    x, weight = (chance.normal(size=size).astype(np.float32) for size in ((6, 32), (32, 8)))
    router = Router(npu.upload(weight), 3, renormalizes, scale=scale)

    experts, weights = router(npu.upload(x), npu.upload(slots))

    scores = torch.softmax(torch.from_numpy(x) @ torch.from_numpy(weight), -1)
    best = scores.topk(3, -1)
    expected = best.values / best.values.sum(-1, keepdim=True) if renormalizes else best.values
    assert torch.equal(experts.cpu().long(), best.indices)
    torch.testing.assert_close(weights.cpu(), scale * expected)
