"""A forward pass in segments, cut at attention: what becomes of each is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Segment = Callable[..., tuple[Tensor, ...]]
RunSegment = Callable[..., tuple[Tensor, ...]]  # of a segment and its inputs


def run_directly(segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a segment now."""
    return segment(*inputs)
