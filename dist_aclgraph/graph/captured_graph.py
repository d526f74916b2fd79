"""One captured decode graph: what it accepts, its tasks, and its life from capture to release."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dist_aclgraph.device.npu import GraphPool, Npu, runtime, translated
from dist_aclgraph.errors import ReplayMismatchError, StreamExhaustedError
from dist_aclgraph.graph.task_update import Lens, TaskRecorder, TaskUpdates

Forward = Callable[[TaskRecorder], None]


class CapturedGraph:
    """Owns its NPU graph, task handles and events.

    Replays only what it was captured for: the bucket's number of requests, and the buffers whose
    addresses are baked into it. Anything else is refused, always.
    """

    def __init__(
        self,
        num_tokens: int,
        graph: Any,
        recorder: TaskRecorder,
        pool: GraphPool,
        addresses: tuple[int, ...],
    ) -> None:
        self.num_tokens = num_tokens
        self._graph = graph
        self._recorder = recorder
        self._pool = pool
        self._addresses = addresses
        self._updates = TaskUpdates(recorder.tasks)
        self._lens: Lens

    @property
    def num_tasks(self) -> int:
        """Attention operators to update, one for each layer."""
        return len(self._recorder.tasks)

    def replay(
        self,
        main_stream: Any,
        update_stream: Any,
        addresses: tuple[int, ...],
        query_ends: list[int],
        kv_lens: list[int],
    ) -> None:
        """Queue one replay; it stops at its first task until ``update`` lets it pass.

        Args:
            addresses: of the buffers that hold the step's inputs.
            query_ends, kv_lens: [num_tokens], padding included; ``update`` sends them where
                they were not sent ahead.

        Raises:
            ReplayMismatchError: the inputs are not those of the capture; nothing was queued.
        """
        if addresses != self._addresses:
            raise ReplayMismatchError(
                f"the graph of bucket {self.num_tokens} was captured on buffers at "
                f"{self._addresses}, the step's lie at {addresses}; capture it again"
            )
        if not len(query_ends) == len(kv_lens) == self.num_tokens == query_ends[-1]:
            raise ReplayMismatchError(
                f"the graph of bucket {self.num_tokens} was given {len(kv_lens)} KV lengths and "
                f"{len(query_ends)} query ends up to {query_ends[-1]}; all must be "
                f"{self.num_tokens}"
            )
        self._lens = (query_ends, kv_lens)
        self._updates.before_replay(main_stream, update_stream, self._lens)
        self._graph.replay()

    def update(self, main_stream: Any, update_stream: Any) -> int:
        """Send the lengths of the replay queued last to the tasks that were not sent them ahead.

        Layer by layer; the host waits for nothing. Returns how many tasks that were.
        """
        return self._updates.after_replay(main_stream, update_stream, self._lens)

    def send_ahead(
        self, update_stream: Any, lens: Lens, is_wanted_elsewhere: Callable[[], bool]
    ) -> None:
        """Send the lengths that the next replay will most likely want; it may want others.

        Call after ``update``, any number of times with the same lengths. Stops between two layers
        as soon as ``is_wanted_elsewhere`` says so.
        """
        self._updates.send_ahead(update_stream, lens, is_wanted_elsewhere)

    def release(self) -> None:
        """Give streams and memory back."""
        self._recorder.tasks.clear()
        self._graph.reset()
        self._pool.remove_graph()


def capture(
    num_tokens: int,
    forward: Forward,
    *,
    npu: Npu,
    stream: Any,
    pool: GraphPool,
    addresses: tuple[int, ...],
) -> CapturedGraph:
    """Record ``forward`` on ``stream``; nothing runs. A failed capture leaves nothing behind.

    Raises:
        StreamExhaustedError, OutOfDeviceMemoryError: what the device ran out of.
        CaptureError: any other refusal, with the operator's name.
    """
    if npu.available_streams() < 1:  # torch_npu's allocator would be left half-way into a capture
        raise StreamExhaustedError(
            f"capturing bucket {num_tokens}: no stream is left on this device (207008); capture "
            "fewer sizes, or lower what else holds streams"
        )
    npu.synchronize()
    graph = runtime().NPUGraph()
    recorder = TaskRecorder(stream)
    pool.add_graph()
    try:
        with translated(f"capturing bucket {num_tokens}"), runtime().stream(stream):
            _record(graph, recorder, forward, pool.handle)
    except BaseException:
        recorder.tasks.clear()
        pool.remove_graph()
        raise
    return CapturedGraph(num_tokens, graph, recorder, pool, addresses)


def _record(graph: Any, recorder: TaskRecorder, forward: Forward, pool_handle: Any) -> None:
    # Thread-local: Ray's and the controller's threads may go on meanwhile.
    graph.capture_begin(pool=pool_handle, capture_error_mode="thread_local")
    try:
        forward(recorder)
    except BaseException:
        # The capture may be invalid already; the error that made it so is the one to report.
        with suppress(RuntimeError):
            graph.capture_end()
        graph.reset()
        raise
    try:
        graph.capture_end()
    except RuntimeError:
        graph.reset()
        raise
