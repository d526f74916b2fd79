"""A bucket that is captured as several graphs: one graph (a *piece*) for each segment of the model
between two attention operators.

Attention runs eagerly between the pieces, with the lengths of the step. So the same graphs can be
replayed for any mixture of prefill and decode. The values that one piece passes to the next piece
are in the memory pool that all graphs share. These values are valid only until the next piece of
the same step has run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dist_aclgraph.device.npu import weak_reference
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.layers.segments import Segment
from dist_aclgraph.planning.descriptor import BatchDescriptor


class CapturedPieces:
    """Owns the graphs of one bucket. The model's loop over segments calls ``capture`` or
    ``replay`` for each segment.

    Attributes:
        graphs: torch_npu's graphs, in the order of the pieces.
    """

    def __init__(self, descriptor: BatchDescriptor, recording: Recording) -> None:
        self.descriptor = descriptor
        self._recording = recording
        self.graphs: list[Any] = []
        # References are weak, so that the pool can reuse the memory of these values.
        self._outputs: list[tuple[Tensor, ...]] = []
        self._next = 0

    def capture(self, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Record the next piece. The caller must hold references to the piece's outputs until all
        later pieces that read them are recorded.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: the capture failed; the
                caller must release the recorded pieces.
        """
        made: list[tuple[Tensor, ...]] = []
        name = f"{self.descriptor}, piece {len(self.graphs)}"
        graph = self._recording.record(name, lambda: made.append(segment(*inputs)))
        self.graphs.append(graph)
        self._outputs.append(tuple(weak_reference(output) for output in made[0]))
        return made[0]

    def begin(self) -> None:
        """Begin a step: the next call of ``replay`` replays the first piece."""
        self._next = 0

    def replay(self, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Queue the replay of the next piece, instead of running its segment."""
        index = self._next
        self._next += 1
        self.graphs[index].replay()
        return self._outputs[index]

    def release(self) -> None:
        """Release streams and memory."""
        self._outputs.clear()
        while self.graphs:
            self._recording.forget(self.graphs.pop())
