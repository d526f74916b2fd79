"""If a capture fails, the streams and graphs of its bucket are released."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.graph_store import GraphStore
from dist_aclgraph.errors import CaptureError
from tests.plans import decode_graph


def test_of_a_step_whose_second_graph_fails_the_first_is_given_back(npu: Npu) -> None:
    x = torch.ones(8, device=npu.device)
    store = GraphStore(npu)

    def works(*_: Any) -> torch.Tensor:
        return x + 1

    def fails(*_: Any) -> torch.Tensor:
        raise CaptureError("a rule of ours")

    store.capture_whole(decode_graph(1), {0: [works]}, ())
    store.release(decode_graph(1))
    before = npu.available_streams()

    with pytest.raises(CaptureError, match="a rule of ours") as caught:
        store.capture_whole(decode_graph(1), {0: [works, fails]}, ())

    # ``caught`` keeps the frames of the failed capture alive.
    assert npu.available_streams() == before, caught
    assert store.is_empty
