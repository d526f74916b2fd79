"""One captured decode graph: what it accepts, its tasks, and its life from capture to release."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dist_aclgraph.device.npu import GraphPool, Npu, runtime, translated
from dist_aclgraph.errors import ReplayMismatchError, StreamExhaustedError
from dist_aclgraph.graph.task_update import Lens, TaskRecorder, update_tasks

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
        self._next_lens: Lens | None = None
        self._sent_lens: Lens | None = None
        self._before_replay = runtime().Event()

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
            query_ends, kv_lens: [num_tokens], padding included; ``update`` sends them.

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
        self._next_lens = (query_ends, kv_lens)
        # Orders this step's events behind the resets of the step before; see task_update.py.
        self._before_replay.record(main_stream)
        update_stream.wait_event(self._before_replay)
        self._graph.replay()

    def update(self, update_stream: Any) -> None:
        """Patch the tasks of the replay queued last, in layer order; the host waits for nothing.

        Lengths that did not change since the replay before are not sent again.
        """
        lens = None if self._next_lens == self._sent_lens else self._next_lens
        self._sent_lens = self._next_lens
        with runtime().stream(update_stream):
            update_tasks(self._recorder.tasks, update_stream, lens)

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
