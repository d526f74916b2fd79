"""A bucket captured in pieces: a graph for each segment between two attentions.

Attention runs between the pieces, eagerly, with the step's own lengths, so that any mixture of
prefill and decode replays the same graphs. Values between two pieces are in the pool that all
graphs share. They are valid only from one piece to the next of the same step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dist_aclgraph.device.npu import weak_reference
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.layers.segments import Segment
from dist_aclgraph.planning.descriptor import BatchDescriptor


class CapturedPieces:
    """Owns the graphs of one bucket. Runs segments, so that the model's own loop drives it.

    Attributes:
        graphs: torch_npu's, in the order of the pieces.
    """

    def __init__(self, descriptor: BatchDescriptor, recording: Recording) -> None:
        self.descriptor = descriptor
        self._recording = recording
        self.graphs: list[Any] = []
        self._outputs: list[tuple[Tensor, ...]] = []  # weak: the pool may reuse their memory
        self._next = 0

    def capture(self, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Record the next piece; the caller keeps its outputs while later pieces read them.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: release the recorded pieces.
        """
        made: list[tuple[Tensor, ...]] = []
        name = f"{self.descriptor}, piece {len(self.graphs)}"
        graph = self._recording.record(name, lambda: made.append(segment(*inputs)))
        self.graphs.append(graph)
        self._outputs.append(tuple(weak_reference(output) for output in made[0]))
        return made[0]

    def begin(self) -> None:
        """Start over at the first piece."""
        self._next = 0

    def replay(self, segment: Segment, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Queue the next piece in place of its segment."""
        index = self._next
        self._next += 1
        self.graphs[index].replay()
        return self._outputs[index]

    def release(self) -> None:
        """Release streams and memory."""
        self._outputs.clear()
        while self.graphs:
            self._recording.forget(self.graphs.pop())
