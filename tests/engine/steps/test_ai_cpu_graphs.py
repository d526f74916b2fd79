"""The report of a graph names its operators on the AI CPU."""

from __future__ import annotations

import logging

import pytest
import torch

from dist_aclgraph.actors.capture.lockstep_capture import cost_of
from dist_aclgraph.actors.engine.engine_report import group_report
from dist_aclgraph.device import npu as device
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.graph_store import GraphStore
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost
from tests.plans import decode_graph, pieces
from tests.unit.scheduler.test_scheduler import make_scheduler


def capture(npu: Npu, dtype: torch.dtype, graph: BatchDescriptor) -> CaptureCost:
    """Capture sums of elements of type ``dtype``. There is no kernel for int64, so the AI CPU
    computes sums of int64.
    """
    x = torch.ones(8, dtype=dtype, device=npu.device)
    store = GraphStore(npu)

    def sums(*others: object) -> tuple[torch.Tensor, ...]:
        return (x.cumsum(0), (x + 1).cumsum(0))

    if graph.mode == "FULL":
        return store.capture_whole(graph, {0: [sums]}, ())
    return store.capture_pieces(graph, lambda made: made.capture(sums))


@pytest.mark.parametrize("graph", [decode_graph(1), pieces(16)])
def test_a_capture_names_its_operators_on_the_ai_cpu(npu: Npu, graph: BatchDescriptor) -> None:
    assert capture(npu, torch.int64, graph).ai_cpu == {"aclnnCumsum": 2}
    assert capture(npu, torch.float32, graph).ai_cpu == {}


def test_a_device_that_does_not_describe_its_graphs_is_believed_to_have_captured(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: object, path: str) -> None:
        raise RuntimeError("not supported")

    wrapped = device.runtime().NPUGraph.__mro__[1]
    monkeypatch.setattr(wrapped, "debug_dump", refuse)

    assert capture(npu, torch.int64, decode_graph(1)).ai_cpu is None


def test_the_report_and_the_log_warn_of_them(caplog: pytest.LogCaptureFixture) -> None:
    graph, cost = decode_graph(4), CaptureCost(ai_cpu={"aclnnSort": 1, "aclnnCumsum": 2})

    with caplog.at_level(logging.WARNING):
        costs = {graph: cost_of(graph, [cost, cost]), decode_graph(1): CaptureCost(ai_cpu={})}
        report = group_report(make_scheduler(), costs, {})

    warning = (
        "the graph full decode 4 holds operators that the AI CPU runs, slowly: "
        "aclnnCumsum (2), aclnnSort (1)"
    )
    assert caplog.messages == [warning]
    assert report["graph_warnings"] == [warning]
    assert [bucket["ai_cpu"] for bucket in report["buckets"]] == [cost.ai_cpu, {}]
