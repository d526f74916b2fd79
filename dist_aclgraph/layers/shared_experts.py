"""Shared experts, which process every token, and the separate stream on which they may run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.device.npu import runtime
from dist_aclgraph.layers.linear import Product
from dist_aclgraph.layers.local_experts import Activation, swiglu


class SideStream:
    """A second stream of a rank, for work that runs at the same time as work on the main stream.

    The work allocates and frees its temporary tensors on this stream, and writes its results to
    tensors of the main stream. The temporary tensors are freed before the main stream waits for
    this stream. Later work on this stream can reuse the memory of the temporary tensors, and no
    event is needed, even in graphs.
    """

    def __init__(self) -> None:
        self._stream = runtime().Stream()

    @contextmanager
    def running(self, work: Callable[[], None]) -> Iterator[None]:
        """Run ``work`` on this stream. At the end of the context, the current stream waits for
        ``work``, even if an error ends the context.

        ``work`` begins after all earlier work on the current stream. ``work`` must not contain a
        collective: all ranks of a group must run collectives in the same order.
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
    """All shared experts, combined to one MLP. Its inner width is split over the tensor parallel
    group.

    Attributes:
        gate_up: multiplies by the weights of gate and up: hidden -> 2 * width.
        down: multiplies by the weights of down: width -> hidden.
        side: stream on which shared experts run while routed experts run on the main stream. If
            None, shared experts run before routed experts.
        gate: [hidden, 1]; the result of a token is multiplied by ``sigmoid(token @ gate)``. None
            if the model has no such gate.
        activate: maps the result of ``gate_up`` to the input of ``down``.
    """

    gate_up: Product
    down: Product
    side: SideStream | None = None
    gate: Tensor | None = None
    activate: Activation = swiglu

    @contextmanager
    def running(self, x: Tensor) -> Iterator[Tensor]:
        """Yield a tensor with this rank's partial sum, [n, hidden]. The tensor is complete when the
        context ends.
        """
        out = torch.empty_like(x)
        if self.side is None:
            self._compute(x, out)
            yield out
            return
        with self.side.running(lambda: self._compute(x, out)):
            yield out

    def _compute(self, x: Tensor, out: Tensor) -> None:
        self.down(self.activate(self.gate_up(x)), out)
        if self.gate is not None:
            out.mul_(torch.mm(x, self.gate).sigmoid())
