"""The main stream always waits for the shared experts' stream, even after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_aclgraph.device.npu import runtime
from dist_aclgraph.layers.shared_experts import SideStream


def test_work_is_done_when_the_context_is_left(npu: Any) -> None:
    side, x = SideStream(), torch.ones(64, 64, device=npu.device)
    out = torch.zeros_like(x)

    for _ in range(20):
        x.add_(1)
        with side.running(lambda: torch.mm(x, x, out=out)):
            beside = x * 2
        total = out + beside

    assert torch.equal(total.cpu(), torch.full((64, 64), 21.0 * 21.0 * 64 + 42.0))


@pytest.mark.parametrize("where", ["beside", "in the work"])
def test_an_error_leaves_nothing_unjoined(npu: Any, where: str) -> None:
    side, x = SideStream(), torch.ones(8, 8, device=npu.device)
    out, failed = torch.zeros_like(x), []
    graph = runtime().NPUGraph()

    def work() -> None:
        torch.mm(x, x, out=out)
        if where == "in the work":
            raise ValueError(where)

    def forward() -> None:
        try:
            with side.running(work):
                raise ValueError(where)
        except ValueError as e:
            failed.append(str(e))

    forward()
    with runtime().graph(graph):  # a capture cannot end with an unjoined stream
        forward()
    out.zero_()
    graph.replay()

    assert failed == [where, where]
    assert torch.equal(out.cpu(), torch.full((8, 8), 8.0))
