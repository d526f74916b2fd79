"""Experts that run for every token, and the stream on which they run beside the routed ones."""

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

    The work allocates and frees its temporary tensors on this stream, and writes results to tensors
    of the main stream. Its temporary tensors end before the join, so the allocator may give their
    memory to the next work without an event, in graphs too.
    """

    def __init__(self) -> None:
        self._stream = runtime().Stream()

    @contextmanager
    def running(self, work: Callable[[], None]) -> Iterator[None]:
        """Run ``work`` inside this context; leaving the context joins it, after an error too.

        The work waits for all earlier work of the current stream. It uses no collective, because
        the collectives of a group need the same order on all ranks.
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
        side: stream beside the routed experts; None runs them before the routed experts.
    """

    gate_up: Product
    down: Product
    side: SideStream | None = None

    @contextmanager
    def running(self, x: Tensor) -> Iterator[Tensor]:
        """Return this rank's part of the sum, [n, hidden]; complete once the context is left."""
        out = torch.empty_like(x)
        if self.side is None:
            self._compute(x, out)
            yield out
            return
        with self.side.running(lambda: self._compute(x, out)):
            yield out

    def _compute(self, x: Tensor, out: Tensor) -> None:
        self.down(torch.ops.npu.npu_swiglu(self.gate_up(x)), out)
