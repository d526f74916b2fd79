"""Records one NPU graph. A failed recording releases its streams and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

from dist_aclgraph.device.npu import (
    GraphPool,
    Npu,
    external_event,
    release_failed_capture,
    runtime,
    translated,
)


class EventPool:
    """Owns the external events that no graph uses. The state of such an event, recorded or reset,
    is unknown.

    torch_npu never frees an external event's device memory (4 KiB). So the events of a released
    graph are used again by the next graph.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._free: list[Any] = []

    def take(self) -> Any:
        return self._free.pop() if self._free else external_event()

    def give_back(self, events: Iterable[Any]) -> None:
        """Store the events of a released graph for later graphs."""
        for event in events:
            # The next capture will wait for the event. torch_npu allows this wait only if the event
            # was recorded after the previous wait.
            event.record(self._stream)
            self._free.append(event)


class Recording:
    """Owns the only stream on which graphs are recorded, and the memory pool that all graphs share.

    There is only one stream, because each block of the pool belongs to the stream that allocated
    the block. So every graph gets the blocks that the previous graph freed, at the same addresses.
    """

    def __init__(self, npu: Npu, pool: GraphPool) -> None:
        self._npu = npu
        self._pool = pool
        self.stream: Any = runtime().Stream()
        self.events = EventPool(self.stream)

    @cached_property
    def counts_streams(self) -> bool:
        """Whether a capture reduces the number of free streams that the device reports, and a
        release increases the number again. The first use of this property makes a test capture.
        """
        return self._npu.counts_graphs(self.stream)

    def record(self, name: str, body: Callable[[], None]) -> Any:
        """Record ``body`` as a graph, without running it. The memory pool is not freed before
        ``forget`` is called for this graph.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError: the device ran out of streams or memory.
            CaptureError: the capture failed for another reason; the error names the operator.
        """
        self._npu.synchronize()
        with translated(f"capturing {name}"):
            self._npu.try_capture(self.stream)
        graph = runtime().NPUGraph()
        self._pool.add_graph()
        try:
            with translated(f"capturing {name}"), runtime().stream(self.stream):
                _record(graph, body, self._pool.handle)
        except BaseException:
            self._pool.remove_graph()
            raise
        return graph

    def forget(self, graph: Any) -> None:
        """Release a graph's streams. For the last graph, also release the memory of the pool."""
        graph.reset()
        self._pool.remove_graph()


def _record(graph: Any, body: Callable[[], None], pool_handle: Any) -> None:
    # The capture mode is thread-local, so that threads of Ray and of the controller may use the
    # device during the capture.
    graph.capture_begin(pool=pool_handle, capture_error_mode="thread_local")
    try:
        body()
    except BaseException:
        # If the error has made the capture invalid, ending the capture raises a second error. Only
        # the first error is passed on.
        with suppress(RuntimeError):
            _end(graph, pool_handle)
        graph.reset()
        raise
    _end(graph, pool_handle)


def _end(graph: Any, pool_handle: Any) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        release_failed_capture(pool_handle)
        raise
