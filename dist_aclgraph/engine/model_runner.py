"""Executes steps on one NPU: fills the buffers, replays or runs eagerly, samples.

Owns the model, the KV cache, the static buffers and the captured graphs of its rank. Carries out
the plan's decisions; makes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.config import Config
from dist_aclgraph.device.npu import (
    GraphPool,
    Npu,
    PoolMemory,
    Stopwatch,
    UpdateWait,
    runtime,
    translated,
)
from dist_aclgraph.engine.input_batch import InputBatch, StepInputs
from dist_aclgraph.engine.sampler import SamplingRow, choose_tokens, report_logprobs
from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.graph.captured_graph import CapturedGraph, capture
from dist_aclgraph.graph.descriptor import BatchDescriptor
from dist_aclgraph.graph.digest import OperatorDigest
from dist_aclgraph.graph.padding import Lens, pad_lens
from dist_aclgraph.graph.pieces import CapturedPieces
from dist_aclgraph.graph.plan import CaptureCost
from dist_aclgraph.graph.recording import Recording
from dist_aclgraph.graph.step_buffers import StepBuffers
from dist_aclgraph.graph.task_update import TaskRecorder
from dist_aclgraph.layers.attention import AttentionMetadata, make_causal_mask
from dist_aclgraph.models.attention import Cache
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.segments import RunSegment, run_directly
from dist_aclgraph.scheduler.step import (
    IntArray,
    RowLogprobs,
    StepPlan,
    StepResult,
    pack_ints,
)

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

Captured = CapturedGraph | CapturedPieces
NO_INTS = np.empty(0, np.int32)
NO_STEP = StepInputs(
    rows=NO_INTS,
    token_ids=NO_INTS,
    positions=NO_INTS,
    slots=NO_INTS,
    query_ends=NO_INTS,
    kv_lens=NO_INTS,
    block_table=np.empty((0, 1), np.int32),
    sampled=np.empty(0, np.intp),
    last_tokens=NO_INTS,
)


class ModelRunner:
    """One rank's execution of steps.

    Args:
        owns_output: this rank samples; the others of its tensor parallel group acknowledge.
        graphs: all that may be captured; buffers are made for the largest.
    """

    def __init__(
        self,
        config: Config,
        npu: Npu,
        model: Decoder,
        *,
        num_blocks: int,
        max_len: int,
        graphs: Sequence[BatchDescriptor],
        owns_output: bool,
    ) -> None:
        self._npu = npu
        self._max_len = max_len
        self._model = model
        self._owns_output = owns_output
        dtype = TORCH_DTYPES[config.dtype]
        block_size = config.kv.block_size
        self._batch = InputBatch(config.scheduler.max_num_seqs, max_len, block_size)
        self._dtype, self._block_size = dtype, block_size
        self._caches: list[Cache] = []
        self._causal_mask = make_causal_mask(npu.device)
        max_reqs = max([config.scheduler.max_num_seqs + 1, *(g.num_reqs for g in graphs)])
        self._buffers = StepBuffers(
            npu,
            max([1, *(graph.num_tokens for graph in graphs)]),
            max_reqs,
            -(-max_len // block_size),
            model.spec.vocab_size,
            dtype,
        )
        self._main_stream = runtime().current_stream()
        self._update_stream = runtime().Stream()
        self._pool = GraphPool()
        self._recording = Recording(npu, self._pool)
        self._graphs: dict[BatchDescriptor, Captured] = {}
        self._uncommitted: dict[BatchDescriptor, Captured] = {}  # no step replays them yet
        self._sampled_cpu = npu.pinned((config.scheduler.max_num_seqs,), torch.int32)
        self._sampled_np: IntArray = self._sampled_cpu.numpy()
        self._sampled_ready: Any = runtime().Event()
        self._watch = Stopwatch(config.profile)
        self._update_wait = UpdateWait(npu.kind == "emulated") if config.profile else None
        self._sends_ahead = config.graph.send_ahead
        # The graph that the last step replayed, and the lengths that it will most likely want next.
        self._ahead: tuple[CapturedGraph, Lens] | None = None
        self.make_cache(num_blocks)

    def make_cache(self, num_blocks: int) -> None:
        """Replace the KV cache by an empty one; no graph may be captured, as it holds addresses."""
        assert not self._graphs
        assert not self._uncommitted
        self._caches.clear()  # before the new one: there may be no room for both
        self._caches = self._model.make_caches(num_blocks, self._block_size, self._dtype)

    # ---- graphs

    def warm_up(self, graph: BatchDescriptor) -> None:
        """Run a graph's work eagerly on padding: lazy set-up must not fall into the capture."""
        with translated(f"running {graph} before its capture"), torch.inference_mode():
            self._buffers.write_padding(graph)
            if graph.mode == "FULL":
                self._run_whole(graph, None)
            else:
                hidden = self._run_pieces(graph, NO_STEP, run_directly)
                self._model.logits(hidden[:1])
        self._npu.synchronize()

    def capture(self, graph: BatchDescriptor) -> CaptureCost:
        """Capture one bucket and return what it took.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: nothing is left behind.
        """
        started_s = time.perf_counter()
        self._npu.synchronize()
        # A capture cannot take back what the allocator keeps for others, such as the pool of a
        # capture that was undone.
        runtime().empty_cache()
        streams, pool = self.free_streams, self._pool.memory()
        with OperatorDigest() as digest, torch.inference_mode():
            record = self._capture_whole if graph.mode == "FULL" else self._capture_pieces
            self._uncommitted[graph] = record(graph)
        left = self.free_streams
        return CaptureCost(
            streams=0 if streams is None or left is None else streams - left,
            bytes=self._pool.memory().total_bytes - pool.total_bytes,
            seconds=time.perf_counter() - started_s,
            digest=digest.hexdigest(),
        )

    def commit(self, graph: BatchDescriptor) -> None:
        """Let steps replay a graph: every rank has it."""
        self._graphs[graph] = self._uncommitted.pop(graph)

    def release(self, graph: BatchDescriptor) -> None:
        """Undo the capture of one bucket, if there is one, committed or not."""
        captured = self._uncommitted.pop(graph, None) or self._graphs.pop(graph, None)
        if captured is not None:
            self._ahead = None
            self._npu.synchronize()
            captured.release()

    @property
    def free_streams(self) -> int | None:
        """Streams left for graphs; None where the device's count does not follow graphs."""
        return self._npu.available_streams() if self._recording.counts_streams else None

    @property
    def pool_memory(self) -> PoolMemory:
        """What all captures together hold."""
        return self._pool.memory()

    def _capture_whole(self, graph: BatchDescriptor) -> CapturedGraph:
        return capture(
            graph,
            lambda tasks: self._run_whole(graph, tasks),
            recording=self._recording,
            addresses=self._buffers.addresses,
        )

    def _capture_pieces(self, graph: BatchDescriptor) -> CapturedPieces:
        pieces = CapturedPieces(graph, self._recording)
        try:
            self._run_pieces(graph, NO_STEP, pieces.capture)
        except BaseException:
            pieces.release()
            raise
        return pieces

    # ---- steps

    def execute(self, plan: StepPlan, dp_rank: int, rank: int) -> StepResult:
        """Run one step and return its new tokens (ranks without output: an acknowledgement)."""
        watch = self._watch
        watch.start()
        self._ahead = None
        batch = plan.batches[dp_rank]
        self._batch.apply(batch)
        inputs = self._batch.step_inputs(batch)
        with translated(f"step {plan.step}"), torch.inference_mode():
            logits, tokens = self._run(plan.graph, inputs)
            result = self._sample(inputs, logits, tokens)
        if result is None:
            return StepResult(plan.epoch, plan.step, rank, timings_us=watch.stages)
        token_ids, logprobs = result
        watch.lap("sample")
        return StepResult(
            plan.epoch,
            plan.step,
            rank,
            token_ids=pack_ints(token_ids),
            logprobs=tuple(logprobs),
            timings_us=watch.stages,
            beside_us=watch.take_beside(),
        )

    def prepare_next(self, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Until ``is_wanted_elsewhere``, do what the next step will most likely need."""
        with translated("sending lengths ahead"):
            self._send_ahead(is_wanted_elsewhere)

    def _send_ahead(self, is_wanted_elsewhere: Callable[[], bool]) -> None:
        if self._ahead is None:
            return
        graph, lens = self._ahead
        start_s = time.perf_counter()
        graph.send_ahead(self._update_stream, lens, is_wanted_elsewhere)
        duration_us = (time.perf_counter() - start_s) * 1e6
        self._watch.book("update_ahead", duration_us)
        self._watch.book("update_per_layer", duration_us / graph.num_tasks)

    def _run(self, graph: BatchDescriptor | None, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return logits and most probable tokens of the requests that get a token."""
        if graph is None:
            return self._run_eagerly(inputs)
        captured = self._graphs.get(graph)
        if captured is None:
            raise ReplayMismatchError(
                f"the plan asks for {graph}; captured here are "
                f"{', '.join(map(str, self._graphs)) or 'none'}"
            )
        self._buffers.write(
            graph,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.last_tokens,
            inputs.block_table,
        )
        if isinstance(captured, CapturedGraph):
            return self._replay_whole(captured, inputs)
        return self._replay_pieces(captured, inputs)

    def _replay_whole(self, graph: CapturedGraph, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        query_ends, kv_lens = pad_lens(graph.descriptor, inputs.query_ends, inputs.kv_lens)
        self._watch.lap("inputs")
        if self._update_wait is not None:
            self._update_wait.begin(self._main_stream)
        graph.replay(
            self._main_stream, self._update_stream, self._buffers.addresses, query_ends, kv_lens
        )
        self._watch.lap("replay")
        num_behind = graph.update(self._main_stream, self._update_stream)
        self._watch.book("update_per_layer", self._watch.lap("update") / graph.num_tasks)
        if self._update_wait is not None:
            self._update_wait.end(self._update_stream, num_behind)
        n = len(inputs.rows)
        is_decode = len(inputs.token_ids) == n
        if self._sends_ahead and is_decode and int(inputs.kv_lens.max()) < self._max_len:
            # Every live row one longer; padding stays.
            live = (inputs.kv_lens + 1).tolist()
            self._ahead = graph, (query_ends, live + kv_lens[n:])
        n = len(inputs.sampled)
        return self._buffers.logits[:n], self._buffers.sampled[:n]

    def _replay_pieces(self, pieces: CapturedPieces, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        self._watch.lap("inputs")
        pieces.begin()
        graph = pieces.descriptor
        hidden = self._run_pieces(graph, inputs, pieces.replay)
        last_tokens = self._buffers.inputs(graph).last_tokens[: len(inputs.last_tokens)]
        return self._choose(hidden, last_tokens)

    def _run_eagerly(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        # One transfer for all integers of the step.
        num_tokens = len(inputs.token_ids)
        parts = [inputs.token_ids, inputs.positions, inputs.slots, inputs.last_tokens]
        flat = self._npu.upload(np.concatenate([*parts, inputs.block_table.ravel()]))
        sizes = [num_tokens, num_tokens, num_tokens, len(inputs.last_tokens)]
        *arrays, table = torch.split(flat, [*sizes, inputs.block_table.size])
        token_ids, positions, slots, last_tokens = arrays
        metadata = self._metadata(inputs, slots, table.view(inputs.block_table.shape))
        self._watch.lap("inputs")
        hidden = self._model.forward(token_ids, positions, slots, self._caches, metadata)
        return self._choose(hidden, last_tokens)

    def _choose(self, hidden: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the last tokens, and the most probable token of each."""
        if len(last_tokens) == 0:  # chunks of prompts only: nobody gets a token
            empty = torch.empty(0, dtype=torch.int32, device=self._npu.device)
            return hidden[:0], empty
        if len(last_tokens) < len(hidden):
            hidden = hidden.index_select(0, last_tokens)
        logits = self._model.logits(hidden)
        self._watch.lap("forward")
        return logits, logits.argmax(-1).int()

    def _metadata(
        self, inputs: StepInputs, slots: Tensor, block_table: Tensor
    ) -> AttentionMetadata:
        is_decode = len(inputs.token_ids) == len(inputs.rows)
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_table=block_table,
            query_ends=inputs.query_ends.tolist(),
            kv_lens=inputs.kv_lens.tolist(),
            causal_mask=None if is_decode else self._causal_mask,
        )
        return self._prepared(metadata, inputs.block_table)

    def _prepared(self, metadata: AttentionMetadata, block_table: IntArray) -> AttentionMetadata:
        return self._model.kind.prepare(metadata, block_table, self._block_size, self._npu.upload)

    def _sample(
        self, inputs: StepInputs, logits: Tensor, tokens: Tensor
    ) -> tuple[IntArray, list[RowLogprobs | None]] | None:
        """Return token ids and log-probabilities of the requests that get a token."""
        if not self._owns_output:
            # Acknowledge what has run, not what is queued: a fault here is then ours by name.
            self._wait_for_device()
            return None
        n = len(inputs.sampled)
        if n == 0:
            return np.empty(0, np.int32), []
        rows = inputs.rows[inputs.sampled]
        special = np.flatnonzero(~self._batch.is_plain[rows])
        self._sampled_cpu[:n].copy_(tokens, non_blocking=True)
        logprobs: list[RowLogprobs | None] = []
        if len(special):
            logprobs = [None] * n
            picked = logits
            if len(special) < n:
                picked = logits.index_select(0, self._npu.upload(special.astype(np.int32)))
            wanted = [self._sampling_row(int(row)) for row in rows[special]]
            chosen = choose_tokens(picked, wanted, self._npu.upload)
            reports = report_logprobs(picked, chosen, wanted)
            for index, report in zip(special, reports, strict=True):
                logprobs[index] = report
        self._wait_for_device()
        self._buffers.mark_read()
        token_ids = self._sampled_np[:n].copy()
        if len(special):
            token_ids[special] = chosen.cpu().numpy()
        if not any(logprobs):
            logprobs = []
        return token_ids, logprobs

    def _wait_for_device(self) -> None:
        """The one place where the host waits for a step, and does what it can meanwhile."""
        self._sampled_ready.record(self._main_stream)
        self._send_ahead(self._sampled_ready.query)
        self._sampled_ready.synchronize()
        if self._update_wait is not None:
            self._watch.book("update_wait", self._update_wait.take_us())

    def _sampling_row(self, row: int) -> SamplingRow:
        length = self._batch.num_tokens[row]
        return SamplingRow(self._batch.sampling[row], self._batch.token_ids[row, :length])

    # ---- shared by warm-up, capture and replay

    def _run_whole(self, graph: BatchDescriptor, tasks: TaskRecorder | None) -> None:
        """The step of a full graph on padding, from the static inputs to the static outputs."""
        inputs, buffers = self._buffers.inputs(graph), self._buffers
        query_ends, kv_lens = pad_lens(graph, NO_INTS, NO_INTS)
        metadata = AttentionMetadata(
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            query_ends=query_ends,
            kv_lens=kv_lens,
            causal_mask=None if graph.query_len == 1 else self._causal_mask,
            tasks=tasks,
        )
        metadata = self._prepared(metadata, NO_STEP.block_table)
        hidden = self._model.forward(
            inputs.token_ids, inputs.positions, inputs.slot_mapping, self._caches, metadata
        )
        if graph.query_len != 1:
            hidden = hidden.index_select(0, inputs.last_tokens)
        logits = self._model.logits(hidden, buffers.logits[: graph.num_reqs])
        # On every rank, though one of them samples: all capture the same operators.
        buffers.sampled[: graph.num_reqs].copy_(logits.argmax(-1))

    def _run_pieces(self, graph: BatchDescriptor, step: StepInputs, run: RunSegment) -> Tensor:
        """Run the segments on static inputs, attention on the live; return [bucket, hidden]."""
        inputs = self._buffers.inputs(graph)
        slots = inputs.slot_mapping[: len(step.token_ids)]
        metadata = self._metadata(step, slots, inputs.block_table[: len(step.rows)])
        return self._model.forward(
            inputs.token_ids, inputs.positions, inputs.slot_mapping, self._caches, metadata, run
        )
