"""Captures, commits and releases the graphs of one rank, one bucket at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dist_aclgraph.device.npu import GraphPool, Npu, PoolMemory, ai_cpu_operators
from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.graphs.captured_graph import CapturedGraph, Forward, capture
from dist_aclgraph.graphs.digest import OperatorDigest
from dist_aclgraph.graphs.pieces import CapturedPieces
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost

WholeStep = tuple[CapturedGraph, ...]
"""The full graphs of a step, replayed one after another: the decoder, then its drafts if any."""

Captured = WholeStep | CapturedPieces

ANY_LENGTH = 0
Bucket = dict[int, Captured]
"""The graphs of one bucket by the longest KV length that they accept, ascending. The only key is
``ANY_LENGTH`` if the graphs accept all lengths."""


class GraphStore:
    """Owns the graphs, their pool and the stream on which they are recorded."""

    def __init__(self, npu: Npu) -> None:
        self._npu = npu
        self._pool = GraphPool()
        self._recording = Recording(npu, self._pool)
        self._graphs: dict[BatchDescriptor, Bucket] = {}
        # Captured graphs that steps must not replay yet, because some ranks may not have them.
        self._uncommitted: dict[BatchDescriptor, Bucket] = {}

    @property
    def is_empty(self) -> bool:
        return not self._graphs and not self._uncommitted

    def find(self, graph: BatchDescriptor, kv_len: int) -> Captured:
        """Return the captured graphs of the bucket ``graph``. If the bucket has graphs for several
        KV lengths, return the graphs for the smallest length that is at least ``kv_len``.

        Raises:
            ReplayMismatchError: there is no such graph, or steps must not replay it yet.
        """
        bucket = self._graphs.get(graph)
        if bucket is None:
            raise ReplayMismatchError(
                f"the plan asks for {graph}; captured here are "
                f"{', '.join(map(str, self._graphs)) or 'none'}"
            )
        if ANY_LENGTH in bucket:
            return bucket[ANY_LENGTH]
        for size, captured in bucket.items():
            if kv_len <= size:
                return captured
        raise ReplayMismatchError(
            f"a request of {graph} has {kv_len} tokens; graphs are captured for {max(bucket)}"
        )

    def capture_whole(
        self,
        graph: BatchDescriptor,
        forwards: Mapping[int, Sequence[Forward]],
        addresses: tuple[int, ...],
    ) -> CaptureCost:
        """Capture each of ``forwards`` as a full graph; see ``_capture``.

        Args:
            forwards: the functions to capture; the keys are KV lengths, see ``Bucket``.
            addresses: addresses of the buffers that the graphs read and write.
        """

        def record() -> Bucket:
            made: dict[int, list[CapturedGraph]] = {}
            try:
                for kv_len, functions in forwards.items():
                    made[kv_len] = []
                    for forward in functions:
                        made[kv_len].append(
                            capture(graph, forward, recording=self._recording, addresses=addresses)
                        )
            except BaseException:
                for whole in made.values():
                    _release(tuple(whole))
                raise
            return {kv_len: tuple(whole) for kv_len, whole in made.items()}

        return self._capture(graph, record)

    def capture_pieces(
        self, graph: BatchDescriptor, run: Callable[[CapturedPieces], object]
    ) -> CaptureCost:
        """Call ``run`` with a ``CapturedPieces`` object, which captures each segment that ``run``
        passes to it; see ``_capture``.
        """

        def record() -> Bucket:
            pieces = CapturedPieces(graph, self._recording)
            try:
                run(pieces)
            except BaseException:
                pieces.release()
                raise
            return {ANY_LENGTH: pieces}

        return self._capture(graph, record)

    def commit(self, graph: BatchDescriptor) -> None:
        """Allow steps to replay a bucket, because every rank has captured this bucket."""
        self._graphs[graph] = self._uncommitted.pop(graph)

    def release(self, graph: BatchDescriptor) -> None:
        """Release the graphs of a bucket, committed or not; do nothing if there are none."""
        bucket = self._uncommitted.pop(graph, None) or self._graphs.pop(graph, None)
        if bucket is not None:
            self._npu.synchronize()
            for captured in bucket.values():
                _release(captured)

    def release_all(self) -> None:
        for graph in [*self._uncommitted, *self._graphs]:
            self.release(graph)

    def forget(self, main_stream: Any) -> None:
        """Reset all full graphs after an abort of the device; see ``TaskUpdates.forget``."""
        for bucket in (*self._graphs.values(), *self._uncommitted.values()):
            for captured in bucket.values():
                for graph in () if isinstance(captured, CapturedPieces) else captured:
                    graph.updates.forget(main_stream)

    @property
    def free_streams(self) -> int | None:
        """Number of free streams of the device; None if the device does not count the streams of
        captured graphs.
        """
        return self._npu.available_streams() if self._recording.counts_streams else None

    @property
    def pool_memory(self) -> PoolMemory:
        """Memory that all captured graphs use together."""
        return self._pool.memory()

    def _capture(self, graph: BatchDescriptor, record: Callable[[], Bucket]) -> CaptureCost:
        """Capture one bucket and return its cost.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: the capture failed; its
                streams and memory are released.
        """
        started_s = time.perf_counter()
        self._npu.synchronize()
        # A capture cannot use the memory of another pool. So the allocator returns its unused
        # memory to the device, for example the pool of a released graph.
        self._npu.give_back()
        streams, pool = self.free_streams, self._pool.memory()
        with OperatorDigest() as digest, torch.inference_mode():
            bucket = self._uncommitted[graph] = record()
        left = self.free_streams
        return CaptureCost(
            streams=0 if streams is None or left is None else streams - left,
            bytes=self._pool.memory().total_bytes - pool.total_bytes,
            seconds=time.perf_counter() - started_s,
            digest=digest.hexdigest(),
            ai_cpu=_ai_cpu_operators(bucket.values()),
        )


def _ai_cpu_operators(bucket: Iterable[Captured]) -> dict[str, int] | None:
    graphs = [
        graph
        for captured in bucket
        for graph in (
            captured.graphs if isinstance(captured, CapturedPieces) else [g.graph for g in captured]
        )
    ]
    try:
        return dict(sum(map(Counter, map(ai_cpu_operators, graphs)), Counter()))
    except RuntimeError:
        return None  # not an error, because only a report needs the numbers


def _release(captured: Captured) -> None:
    if isinstance(captured, CapturedPieces):
        captured.release()
        return
    for graph in captured:
        graph.release()
