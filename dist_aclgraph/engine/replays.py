"""Queues the full graphs of a step, and sends lengths to the captured attention operators before or
after the replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.device.npu import runtime
from dist_aclgraph.device.step_measures import ReplaySpan, Stopwatch, UpdateWait
from dist_aclgraph.engine.graph_store import WholeStep
from dist_aclgraph.graphs.captured_graph import CapturedGraph
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import GraphLens, Lens


class Replays:
    """Owns the stream on which lengths are sent to captured attention operators, and the guessed
    lengths of the next step.

    Args:
        addresses: addresses of the buffers that graphs read and write.
        graph_lens: pads the query lengths and KV lengths of steps.
        max_len: maximum length of a request. No length above this maximum is guessed.
        sends_ahead: whether guessed lengths of the next step are sent while the host waits for the
            device.
        update_wait: measures how long the device waits for lengths; None if this time is not
            measured.
    """

    def __init__(
        self,
        addresses: tuple[int, ...],
        max_len: int,
        graph_lens: GraphLens,
        *,
        sends_ahead: bool,
        watch: Stopwatch,
        update_wait: UpdateWait | None,
    ) -> None:
        self._addresses = addresses
        self._max_len = max_len
        self._graph_lens = graph_lens
        self._sends_ahead = sends_ahead
        self._watch = watch
        self._update_wait = update_wait
        self._main_stream = runtime().current_stream()
        self._update_stream: Any = runtime().Stream()
        self._num_behind = 0  # number of updates that this step sends after its replays
        self._span: ReplaySpan | None = None  # the measurement of this step
        # The graphs and padded lengths of this step, and the guessed graphs and lengths of the next
        # step.
        self._step: tuple[WholeStep, Lens] | None = None
        self._ahead: tuple[WholeStep, Lens] | None = None

    def begin(self, graphs: WholeStep, inputs: HostStep) -> ReplaySpan | None:
        """Begin a step that replays these graphs. Return a value that the caller later passes to
        ``book_wait``.
        """
        lens = self._graph_lens.pad(graphs[0].descriptor, inputs.query_ends, inputs.kv_lens)
        self._step = graphs, lens
        self._watch.lap("lengths")
        if self._update_wait is not None:
            self._span = self._update_wait.begin(self._main_stream)
            self._num_behind = 0
        return self._span

    def replay(self, graph: CapturedGraph) -> None:
        """Queue one graph of the step. On the device, the graph stops at its first attention
        operator until ``update`` is called.

        Raises:
            ReplayMismatchError: the lengths do not fit the graph.
        """
        assert self._step is not None
        _, lens = self._step
        graph.replay(self._main_stream, self._update_stream, self._addresses, lens)
        self._watch.lap("replay")

    def correct(self, inputs: HostStep) -> None:
        """Set the step's correct lengths, which were unknown when the step's first graph was
        queued.
        """
        assert self._step is not None
        graphs, _ = self._step
        graph = graphs[0].descriptor
        self._step = graphs, self._graph_lens.pad(graph, inputs.query_ends, inputs.kv_lens)

    def update(self, graph: CapturedGraph, between: Callable[[], None]) -> None:
        """Send the lengths that a queued replay still needs; the host does not wait.

        Args:
            between: called after each layer.
        """
        assert self._step is not None
        _, lens = self._step
        self._num_behind += graph.updates.after_replay(
            self._main_stream, self._update_stream, lens, between
        )
        duration_us = self._watch.lap("update")
        if graph.num_tasks:
            self._watch.book("update_per_layer", duration_us / graph.num_tasks)

    def end(self) -> None:
        """End the measurement of a step whose graphs are all queued."""
        if self._update_wait is not None and self._span is not None:
            self._update_wait.end(self._span, self._update_stream, self._num_behind)

    def book_wait(self, span: ReplaySpan | None) -> None:
        """Record how long the device waited for lengths in a finished step.

        Args:
            span: the measurement that ``begin`` returned for the step; if None, nothing is
                recorded.
        """
        if self._update_wait is not None and span is not None:
            self._watch.book("update_wait", self._update_wait.take_us(span))

    def forget(self) -> None:
        """Drop the lengths of the present step, and the guessed lengths of the next step."""
        self._step = self._ahead = None

    def guess_next(self, inputs: HostStep, counts: IntArray | int) -> None:
        """Guess the lengths of the next step, assuming that all requests continue.

        Args:
            inputs: inputs of the last step.
            counts: [num_reqs], number of new tokens of each request; or one number for all
                requests.
        """
        if self._step is None or not self._sends_ahead or not len(inputs.rows):
            return
        graphs, _ = self._step
        graph, kv_lens = graphs[0].descriptor, inputs.kv_lens
        if not graph.query_len or int(kv_lens.max()) >= self._max_len:
            return
        lens = self._graph_lens.pad(graph, inputs.query_ends, kv_lens + counts)
        self._ahead = graphs, lens

    def send_ahead(self, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Send the guessed lengths, until ``is_wanted_elsewhere`` says that the host has other
        work.
        """
        if self._ahead is None:
            return
        graphs, lens = self._ahead
        num_tasks = sum(graph.num_tasks for graph in graphs)
        if num_tasks == 0:
            return
        start_s = time.perf_counter()
        for graph in graphs:
            graph.updates.send_ahead(
                self._main_stream, self._update_stream, lens, is_wanted_elsewhere
            )
        duration_us = (time.perf_counter() - start_s) * 1e6
        self._watch.book("update_ahead", duration_us)
        self._watch.book("update_per_layer", duration_us / num_tasks)
