"""Experts that every token visits, and the stream on which they run beside the routed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.device.npu import runtime
from dist_aclgraph.layers.linear import Product


class SideStream:
    """One stream of a rank, for work that runs beside its main stream.

    Work allocates and frees on this stream what it needs for itself, and writes results to tensors
    of the main stream. Nothing that it allocated outlives the join, so that the allocator may give
    the memory to the next work without an event, in graphs too.
    """

    def __init__(self) -> None:
        self._stream = runtime().Stream()

    @contextmanager
    def running(self, work: Callable[[], None]) -> Iterator[None]:
        """Run ``work`` while the context lasts; when it is left, by an error too, it is joined.

        The work waits for all that the current stream was given before, and uses no collective:
        those of a group must keep one order on all ranks.
        """
        main = runtime().current_stream()
        self._stream.wait_stream(main)
        try:
            with runtime().stream(self._stream):
                work()
            yield
        finally:
            main.wait_stream(self._stream)


@dataclass(frozen=True)
class SharedExperts:
    """All shared experts as one MLP, split over the tensor parallel group by its inner width.

    Attributes:
        gate_up: hidden -> 2 * width.
        down: width -> hidden.
        side: where they run beside the routed experts; None: before them.
    """

    gate_up: Product
    down: Product
    side: SideStream | None = None

    @contextmanager
    def running(self, x: Tensor) -> Iterator[Tensor]:
        """Give this rank's part of the sum, [n, hidden]; complete when the context is left."""
        out = torch.empty_like(x)
        if self.side is None:
            self._compute(x, out)
            yield out
            return
        with self.side.running(lambda: self._compute(x, out)):
            yield out

    def _compute(self, x: Tensor, out: Tensor) -> None:
        self.down(torch.ops.npu.npu_swiglu(self.gate_up(x)), out)
