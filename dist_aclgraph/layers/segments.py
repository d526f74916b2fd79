"""Cuts a forward pass into segments at each attention operator. The caller decides how each segment
runs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Segment = Callable[..., tuple[Tensor, ...]]
RunSegment = Callable[..., tuple[Tensor, ...]]  # runs a segment; arguments: segment, its inputs


def work_between(run: RunSegment, work: Callable[[], None]) -> RunSegment:
    """Return a function that runs a segment with ``run``, and calls ``work`` after each segment."""

    def run_and_work(segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = run(segment, *inputs)
        work()
        return outputs

    return run_and_work


def run_directly(segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
    return segment(*inputs)
