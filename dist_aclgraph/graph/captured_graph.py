"""One captured decode graph: what it accepts, its tasks, and its life from capture to release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_aclgraph.device.npu import GraphPool, runtime, translated
from dist_aclgraph.errors import ReplayMismatchError
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
        addresses: tuple[int, ...],
    ) -> None:
        self.num_tokens = num_tokens
        self._graph = graph
        self._recorder = recorder
        self._addresses = addresses
        self._next_lens: Lens | None = None
        self._sent_lens: Lens | None = None

    @property
    def num_tasks(self) -> int:
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
        update_stream.wait_stream(main_stream)
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


def capture(
    num_tokens: int,
    forward: Forward,
    *,
    stream: Any,
    pool: GraphPool,
    addresses: tuple[int, ...],
) -> CapturedGraph:
    """Record ``forward`` on ``stream``; nothing runs. A failed capture leaves nothing behind.

    Raises:
        StreamExhaustedError, OutOfDeviceMemoryError: what the device ran out of.
        CaptureError: any other refusal, with the operator's name.
    """
    runtime().synchronize()
    graph = runtime().NPUGraph()
    recorder = TaskRecorder(stream)
    with translated(f"capturing bucket {num_tokens}"), runtime().stream(stream):
        # Thread-local: Ray's and the controller's threads may go on meanwhile.
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        except RuntimeError:
            pool.end_failed_begin()
            raise
        try:
            forward(recorder)
        except BaseException:
            _abandon(graph, recorder)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            graph.reset()
            raise
    return CapturedGraph(num_tokens, graph, recorder, addresses)


def _abandon(graph: Any, recorder: TaskRecorder) -> None:
    """End a capture that failed, so that stream and pool are free for the next one."""
    recorder.tasks.clear()
    try:
        graph.capture_end()
    except RuntimeError:
        pass  # It is invalid already; the error that made it so is the one to report.
    finally:
        graph.reset()
