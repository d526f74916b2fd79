"""A forward pass in segments, cut at attention: what becomes of each is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Segment = Callable[..., tuple[Tensor, ...]]
RunSegment = Callable[..., tuple[Tensor, ...]]  # of a segment and its inputs


def work_between(run: RunSegment, work: Callable[[], None]) -> RunSegment:
    """Return what runs segments as ``run`` does, and does something else behind each."""

    def run_and_work(segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = run(segment, *inputs)
        work()
        return outputs

    return run_and_work


def run_directly(segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a segment now."""
    return segment(*inputs)
