"""Recording one NPU graph: begin, run, end, and nothing left behind where that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

from dist_aclgraph.device.npu import GraphPool, Npu, runtime, translated


class Recording:
    """Where graphs are recorded: one stream and one pool for all.

    One stream, because the pool's blocks belong to the stream that they were taken on; so every
    graph finds the blocks that the graph before gave back, at the same addresses.
    """

    def __init__(self, npu: Npu, pool: GraphPool) -> None:
        self._npu = npu
        self._pool = pool
        self.stream: Any = runtime().Stream()

    @cached_property
    def counts_streams(self) -> bool:
        """Whether the device's count of streams tells what graphs take; found out at first use."""
        return self._npu.counts_graphs(self.stream)

    def record(self, name: str, body: Callable[[], None]) -> Any:
        """Record ``body``; nothing runs. The pool counts the graph until ``forget``.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError: what the device ran out of.
            CaptureError: any other refusal, with the operator's name.
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
        """Give a graph's streams back, and its memory with the last graph."""
        graph.reset()
        self._pool.remove_graph()


def _record(graph: Any, body: Callable[[], None], pool_handle: Any) -> None:
    # Thread-local: Ray's and the controller's threads may go on meanwhile.
    graph.capture_begin(pool=pool_handle, capture_error_mode="thread_local")
    try:
        body()
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
