"""Executes steps on one NPU: fills the buffers, replays or runs eagerly, samples.

Owns the model, the KV cache, the static buffers and the captured graphs of its rank. Carries out
the plan's decisions; makes none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.config import Config
from dist_aclgraph.device.npu import GraphPool, Npu, Stopwatch, UpdateWait, runtime, translated
from dist_aclgraph.engine.input_batch import InputBatch, StepInputs
from dist_aclgraph.engine.sampler import SamplingRow, sample
from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.graph.captured_graph import CapturedGraph, capture
from dist_aclgraph.graph.decode_buffers import PADDING_KV_LEN, DecodeBuffers
from dist_aclgraph.graph.plan import CaptureCost
from dist_aclgraph.graph.task_update import Lens, TaskRecorder
from dist_aclgraph.layers.attention import AttentionMetadata, KVCache, make_causal_mask
from dist_aclgraph.models.dense import DenseDecoder
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


class ModelRunner:
    """One rank's execution of steps.

    Args:
        owns_output: this rank samples; the others of its tensor parallel group acknowledge.
        max_decode_tokens: the largest bucket that may be captured.
    """

    def __init__(
        self,
        config: Config,
        npu: Npu,
        model: DenseDecoder,
        *,
        num_blocks: int,
        max_len: int,
        max_decode_tokens: int,
        owns_output: bool,
    ) -> None:
        self._npu = npu
        self._max_len = max_len
        self._model = model
        self._owns_output = owns_output
        dtype = TORCH_DTYPES[config.dtype]
        block_size = config.kv.block_size
        self._batch = InputBatch(config.scheduler.max_num_seqs, max_len, block_size)
        self._caches = self._make_caches(num_blocks, block_size, dtype)
        self._causal_mask = make_causal_mask(npu.device)
        self._buffers = DecodeBuffers(
            npu, max_decode_tokens, -(-max_len // block_size), model.spec.vocab_size, dtype
        )
        self._main_stream = runtime().current_stream()
        self._capture_stream = runtime().Stream()
        self._update_stream = runtime().Stream()
        self._pool = GraphPool()
        self._graphs: dict[int, CapturedGraph] = {}
        self._sends_ahead = config.graph.send_ahead
        # The graph that the last step replayed, and the lengths that it will most likely want next.
        self._ahead: tuple[CapturedGraph, Lens] | None = None
        self.pool_bytes = 0  # what all captures together have added to the pool
        self._query_ends = {0: [0]}
        self._sampled_cpu = npu.pinned((config.scheduler.max_num_seqs,), torch.int32)
        self._sampled_np: IntArray = self._sampled_cpu.numpy()
        self._sampled_ready: Any = runtime().Event()
        self._watch = Stopwatch(config.profile)
        self._update_wait = UpdateWait(npu.kind == "emulated") if config.profile else None

    def _make_caches(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[KVCache]:
        heads, head_dim = self._model.heads.num_kv_heads, self._model.spec.head_dim
        shape = (num_blocks, block_size, heads, head_dim)
        caches = []
        for _ in range(self._model.spec.num_layers):
            keys = torch.empty(shape, dtype=dtype, device=self._npu.device)
            values = torch.empty(shape, dtype=dtype, device=self._npu.device)
            # Padding rows read block 0: it must hold numbers.
            keys[0].zero_()
            values[0].zero_()
            caches.append(KVCache(keys, values))
        return caches

    # ---- graphs

    def warm_up(self, num_tokens: int) -> None:
        """Run one bucket eagerly on padding rows: lazy set-up must not fall into the capture."""
        with translated(f"running bucket {num_tokens} before its capture"):
            self._write_padding(num_tokens)
            self._decode(num_tokens, self._padded_lens(num_tokens, None), None)
        self._npu.synchronize()

    def capture(self, num_tokens: int) -> CaptureCost:
        """Capture one bucket and return what it took.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: nothing is left behind.
        """
        started_s = time.perf_counter()
        runtime().synchronize()
        runtime().empty_cache()
        streams, reserved = self._npu.available_streams(), runtime().memory_reserved()
        lens = self._padded_lens(num_tokens, None)

        def forward(tasks: TaskRecorder) -> None:
            self._decode(num_tokens, lens, tasks)

        self._graphs[num_tokens] = capture(
            num_tokens,
            forward,
            npu=self._npu,
            stream=self._capture_stream,
            pool=self._pool,
            addresses=self._buffers.addresses,
        )
        cost = CaptureCost(
            streams=streams - self._npu.available_streams(),
            bytes=runtime().memory_reserved() - reserved,
            seconds=time.perf_counter() - started_s,
        )
        self.pool_bytes += cost.bytes
        return cost

    def release(self, num_tokens: int) -> None:
        """Undo the capture of one bucket, if there is one."""
        graph = self._graphs.pop(num_tokens, None)
        if graph is not None:
            self._ahead = None
            self._npu.synchronize()
            graph.release()

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
            if plan.mode == "FULL":
                logits, tokens = self._replay(plan.num_tokens, inputs)
            else:
                logits, tokens = self._run_eagerly(inputs)
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

    def _replay(self, num_tokens: int, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        graph = self._graphs.get(num_tokens)
        if graph is None:
            raise ReplayMismatchError(
                f"the plan asks for bucket {num_tokens}; captured here are {sorted(self._graphs)}"
            )
        n = len(inputs.rows)
        self._buffers.write(
            num_tokens, inputs.token_ids, inputs.positions, inputs.slots, inputs.block_table
        )
        query_ends, kv_lens = self._padded_lens(num_tokens, inputs)
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
        if self._sends_ahead and int(inputs.kv_lens.max()) < self._max_len:
            # Every live row one longer; padding stays.
            live = (inputs.kv_lens + 1).tolist()
            self._ahead = graph, (query_ends, live + kv_lens[n:])
        return self._buffers.logits[:n], self._buffers.sampled[:n]

    def _run_eagerly(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        # One transfer for all integers of the step.
        num_tokens = len(inputs.token_ids)
        parts = [inputs.token_ids, inputs.positions, inputs.slots, inputs.last_tokens]
        flat = self._npu.upload(np.concatenate([*parts, inputs.block_table.ravel()]))
        sizes = [num_tokens, num_tokens, num_tokens, len(inputs.last_tokens)]
        *arrays, table = torch.split(flat, [*sizes, inputs.block_table.size])
        token_ids, positions, slots, last_tokens = arrays
        is_decode = num_tokens == len(inputs.rows)
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_table=table.view(inputs.block_table.shape),
            query_ends=inputs.query_ends.tolist(),
            kv_lens=inputs.kv_lens.tolist(),
            causal_mask=None if is_decode else self._causal_mask,
        )
        self._watch.lap("inputs")
        hidden = self._model.forward(token_ids, positions, self._caches, metadata)
        if len(inputs.last_tokens) == 0:  # chunks of prompts only: nobody gets a token
            empty = torch.empty(0, dtype=torch.int32, device=self._npu.device)
            return hidden[:0], empty
        if len(inputs.last_tokens) < num_tokens:
            hidden = hidden.index_select(0, last_tokens)
        logits = self._model.logits(hidden)
        self._watch.lap("forward")
        return logits, logits.argmax(-1).int()

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
            chosen, reports = sample(picked, wanted, self._npu.upload)
            for index, report in zip(special, reports, strict=True):
                logprobs[index] = report
        self._wait_for_device()
        self._buffers.mark_read()
        token_ids = self._sampled_np[:n].copy()
        if len(special):
            token_ids[special] = chosen
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

    def _decode(
        self,
        num_tokens: int,
        lens: tuple[list[int], list[int]],
        tasks: TaskRecorder | None,
    ) -> None:
        """The decode step of one bucket, from the static inputs to the static outputs."""
        buffers = self._buffers
        token_ids, positions, slots, block_table = buffers.as_inputs(num_tokens)
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_table=block_table,
            query_ends=lens[0],
            kv_lens=lens[1],
            tasks=tasks,
        )
        with torch.inference_mode():
            hidden = self._model.forward(token_ids, positions, self._caches, metadata)
            logits = self._model.logits(hidden, buffers.logits[:num_tokens])
            if self._owns_output:
                buffers.sampled[:num_tokens].copy_(logits.argmax(-1))

    def _padded_lens(
        self, num_tokens: int, inputs: StepInputs | None
    ) -> tuple[list[int], list[int]]:
        """Return query ends and KV lengths of a decode bucket, padding rows included."""
        query_ends = self._query_ends.get(num_tokens)
        if query_ends is None:
            query_ends = self._query_ends[num_tokens] = list(range(1, num_tokens + 1))
        live = [] if inputs is None else inputs.kv_lens.tolist()
        return query_ends, live + [PADDING_KV_LEN] * (num_tokens - len(live))

    def _write_padding(self, num_tokens: int) -> None:
        none = np.empty(0, np.int32)
        self._buffers.write(num_tokens, none, none, none, np.empty((0, 1), np.int32))
