"""One captured full graph with its attention tasks, from its capture to its release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.graphs.task_update import TaskRecorder, TaskUpdates
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.padding import Lens

Forward = Callable[[TaskRecorder | None], None]


class CapturedGraph:
    """Owns an NPU graph, and the task handles and the events of its attention operators.

    The inputs of a replay must have as many rows and tokens as the inputs of the capture. The
    inputs of a replay must be in the buffers whose addresses the graph contains. All other inputs
    are refused.

    Attributes:
        graph: torch_npu's graph.
        updates: sends lengths to the captured attention operators (tasks), before and after a
            replay.
    """

    def __init__(
        self,
        descriptor: BatchDescriptor,
        graph: Any,
        recorder: TaskRecorder,
        recording: Recording,
        addresses: tuple[int, ...],
    ) -> None:
        self.descriptor = descriptor
        self.graph = graph
        self._recorder = recorder
        self._recording = recording
        self._addresses = addresses
        self.updates = TaskUpdates(recorder.tasks)

    @property
    def num_tasks(self) -> int:
        """Number of captured attention operators whose lengths are updated for each replay."""
        return len(self._recorder.tasks)

    def replay(
        self,
        main_stream: Any,
        update_stream: Any,
        addresses: tuple[int, ...],
        lens: Lens,
    ) -> None:
        """Queue one replay. On the device, the replay stops at its first task until ``updates``
        records the task's event.

        Args:
            addresses: addresses of the buffers that contain the step's inputs.
            lens: the step's lengths, padding included. If ``send_ahead`` has sent these lengths to
                at least one task, the later call of ``after_replay`` must send the same lengths. If
                not, ``after_replay`` may send other lengths.

        Raises:
            ReplayMismatchError: the inputs do not fit the capture; nothing was queued.
        """
        graph, query_ends, num_rows = self.descriptor, lens.query_ends, self._recorder.num_rows
        if addresses != self._addresses:
            raise ReplayMismatchError(
                f"the graph {graph} was captured on buffers at "
                f"{self._addresses}, the step's lie at {addresses}; capture it again"
            )
        counts = {len(query_ends), *map(len, lens.kv_lens)}
        fits = counts == {num_rows} and query_ends[-1] == graph.num_tokens
        if self.num_tasks and not fits:
            raise ReplayMismatchError(
                f"the graph {graph} was given {len(lens.kv_lens[0])} KV lengths and "
                f"{len(query_ends)} query ends up to {query_ends[-1]}; it takes {num_rows} of "
                f"each, up to {graph.num_tokens}"
            )
        self.updates.before_replay(main_stream, update_stream, lens)
        self.graph.replay()

    def release(self) -> None:
        """Release the graph's streams and memory, and return its events to ``EventPool``, so that
        the next capture can use the events.
        """
        tasks = self._recorder.tasks
        self._recording.forget(self.graph)
        self._recording.events.give_back(task.event for task in tasks)
        tasks.clear()


def capture(
    descriptor: BatchDescriptor,
    forward: Forward,
    *,
    recording: Recording,
    addresses: tuple[int, ...],
) -> CapturedGraph:
    """Record ``forward`` without running it. A failed capture releases its streams and memory.

    Raises:
        StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: see ``Recording.record``.
    """
    recorder = TaskRecorder(recording.stream, recording.events)
    try:
        graph = recording.record(str(descriptor), lambda: forward(recorder))
    finally:
        recorder.forget_workspace()
    recorder.clear_events()
    return CapturedGraph(descriptor, graph, recorder, recording, addresses)
