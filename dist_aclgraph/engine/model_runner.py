"""Executes steps on one NPU: fills buffers, replays graphs or runs eagerly, samples and drafts.

The runner owns the model, the KV cache, the static buffers and the captured graphs of its rank. The
runner makes no decisions, because the plan contains all decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.config import Config
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.device.npu import (
    Npu,
    PoolMemory,
    runtime,
    translated,
)
from dist_aclgraph.device.step_measures import DeviceCounts, ReplaySpan, Stopwatch, UpdateWait
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.engine.block_copier import BlockCopier
from dist_aclgraph.engine.cache_copier import CacheCopier
from dist_aclgraph.engine.drafts.draft_steps import DraftSteps
from dist_aclgraph.engine.drafts.landing_drafts import LandingDrafts
from dist_aclgraph.engine.embeddings import queue_embeddings
from dist_aclgraph.engine.graph_store import Captured, GraphStore
from dist_aclgraph.engine.graph_work import GraphWork
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.masks.matchers import Matchers
from dist_aclgraph.engine.mixed_work import MixedWork
from dist_aclgraph.engine.prompt_report import queue_prompts
from dist_aclgraph.engine.rank_caches import RankCaches
from dist_aclgraph.engine.replays import Replays
from dist_aclgraph.engine.state_steps import StateSteps
from dist_aclgraph.engine.step_output import (
    TALLY_SHAPE,
    SpecialPlaces,
    StepOutput,
)
from dist_aclgraph.engine.steps_in_flight import QueuedStep, Sampled, StepsInFlight
from dist_aclgraph.errors import ReplayMismatchError
from dist_aclgraph.graphs.pieces import CapturedPieces
from dist_aclgraph.graphs.step_buffers import StepBuffers
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.layers.context_parallel import UNDIVIDED, ContextParallel
from dist_aclgraph.layers.segments import run_directly
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.planning.buckets import buffer_sizes, kv_sizes
from dist_aclgraph.planning.copy_slots import NUM_STATE_SLOTS
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost
from dist_aclgraph.planning.step_sizes import table_width
from dist_aclgraph.steps.copies import CopyJob
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import GraphLens
from dist_aclgraph.steps.step import RankPlan, StepResult
from dist_aclgraph.text.grammars import read_vocabulary
from dist_aclgraph.topology import ChooseExchange, no_exchange

PROMPT_PLACES = 64  # maximum number of rows of logits that are computed at once for prompts
TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class ModelRunner:
    """Executes the steps of one rank.

    Args:
        owns_output: whether this rank sends the sampled tokens to the engine. The results of the
            other ranks of its tensor parallel group contain no tokens.
        graphs: all graphs that may be captured; the largest graph determines the buffers' sizes.
        choose_exchange: returns the exchange that sends the tokens of a graph or of drafts to their
            experts. For an eager step, the plan contains the exchange.
        context: this rank's groups for context parallelism.
        tiers: the files with copies of this rank's KV blocks; None if no copies are kept.
        state_tiers: the files with copies of this rank's recurrent states; None if no copies are
            kept, or if the model has no recurrent state.
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
        choose_exchange: ChooseExchange = no_exchange,
        context: ContextParallel = UNDIVIDED,
        tiers: KVTiers | None = None,
        state_tiers: KVTiers | None = None,
    ) -> None:
        self._npu = npu
        self._model = model
        self._choose_exchange = choose_exchange
        max_rows, k = config.scheduler.max_num_seqs, config.speculative.num_tokens
        dtype = TORCH_DTYPES[config.dtype]
        self._context = context
        place = ContextPlace(
            Shards.from_config(config), context.dcp.rank, context.pcp.size, context.pcp.rank
        )
        state_slots = None if model.spec.linear is None else StateSlots.from_config(config)
        in_flight = self._max_in_flight = config.scheduler.steps_in_flight
        attention = AttentionSteps(model.kind, place, npu)
        graph_lens = GraphLens(place, k)
        # The decoder and the next-token module have two counters each: one for tokens that experts
        # have computed, one for tokens beyond the capacity of an exchange.
        tally = torch.zeros(TALLY_SHAPE, dtype=torch.int64, device=npu.device)
        decoder_tally, draft_tally = tally[..., 0].unbind(0)
        self._buffers = StepBuffers(
            npu,
            buffer_sizes(graphs, max_rows),
            table_width(max_len, place.shards.tokens_per_block, k),
            model.spec.vocab_size,
            dtype,
            num_drafts=k,
            spare_row=max_rows,
            hidden_size=model.spec.hidden_size,
            steps_in_flight=in_flight,
            state_slots=state_slots,
            reads_device_rows=model.kind.reads_device_rows,
        )
        self._drafts: DraftSteps | None = None
        if k > 0:
            assert model.next_token is not None
            self._drafts = DraftSteps(
                model.next_token,
                k,
                max_rows,
                model.spec.vocab_size,
                npu.device,
                attention=attention,
                tally=draft_tally,
                choose_exchange=choose_exchange,
            )
        # With drafts, or with several steps in flight, every rank needs the sampled tokens.
        # Otherwise, only the rank that sends the output needs them.
        self._samples = owns_output or self._drafts is not None or in_flight > 1
        num_slots = 0 if state_slots is None else state_slots.count
        kv = config.kv
        self.caches = RankCaches(
            npu, model, self._drafts, kv.block_size, dtype, num_slots, kv.dtype == "int8"
        )
        self._states: StateSteps | None = None
        if state_slots is not None and model.spec.linear is not None:
            passed = None if self._drafts is None else self._drafts.passed
            self._states = StateSteps(
                npu,
                state_slots,
                passed,
                model.spec.linear.conv_width,
                poisons=npu.kind == "emulated" and config.device.emulator.checks_data,
            )
        self._work = GraphWork(
            model=model,
            buffers=self._buffers,
            attention=attention,
            graph_lens=graph_lens,
            drafts=self._drafts,
            caches=self.caches.decoder,
            tally=decoder_tally,
            choose_exchange=choose_exchange,
            states=self._states,
            follows=in_flight > 1,
            kv_sizes=kv_sizes(config, max_len),
        )
        num_latest = self._work.tokens.num_latest
        self._batch = InputBatch(max_rows, max_len, place, num_latest, k)
        self._matchers = Matchers(
            self._batch,
            partial(read_vocabulary, config),
            model.spec.vocab_size,
            k + 1,
            rows_may_wait=self._states is None,
        )
        self._landing_drafts = LandingDrafts(npu, max_rows, k) if k else None
        self._output = StepOutput(
            npu, self._batch, max_rows, k, model.spec.vocab_size, dtype, in_flight
        )
        self._graphs = GraphStore(npu)
        self._watch = Stopwatch(config.profile)
        self._counts = DeviceCounts(config.profile and npu.kind == "emulated")
        self._replays = Replays(
            self._buffers.addresses,
            max_len,
            graph_lens,
            # With several steps in flight, no lengths are guessed, because each step sends its
            # correct lengths when it is queued.
            sends_ahead=config.graph.send_ahead and in_flight == 1,
            watch=self._watch,
            update_wait=UpdateWait(npu.kind == "emulated") if config.profile else None,
        )
        self._flights = StepsInFlight(
            batch=self._batch,
            output=self._output,
            buffers=self._buffers,
            replays=self._replays,
            matchers=self._matchers,
            watch=self._watch,
            counts=self._counts,
            tally=tally,
            owns_output=owns_output,
            has_drafts=k > 0,
        )
        self._mixed = MixedWork(
            npu=npu,
            model=model,
            graph_work=self._work,
            attention=attention,
            states=self._states,
            caches=self.caches,
            context=context,
            watch=self._watch,
            replays=self._replays,
            spare_row=max_rows,
        )
        self.make_cache(num_blocks)
        self._copier: CacheCopier | None = None
        if tiers is not None:
            blocks = BlockCopier(npu, self.caches.block_tensors, tiers)
            states = None
            if state_tiers is not None:
                states = BlockCopier(npu, self.caches.state_tensors, state_tiers, NUM_STATE_SLOTS)
            self._copier = CacheCopier(blocks, states, state_slots)

    def make_cache(self, num_blocks: int) -> None:
        """Replace the KV cache by an empty cache.

        No captured graph may exist, because graphs contain the addresses of the old cache.
        """
        assert self._graphs.is_empty
        self.caches.make(num_blocks)

    def note_stages(self, note: Callable[[str], None]) -> None:
        """From now on, call ``note`` with the name of each stage that the host has ended."""
        self._watch.on_lap = note

    def _tokens_at(self, references: IntArray) -> Tensor:
        """Return the tokens to which ``references`` refer, [n] int32, on the device."""
        return self._work.tokens.fill_in(self._npu.upload(references))

    # ---- graphs

    def warm_up(self, graph: BatchDescriptor) -> None:
        """Run a graph's work eagerly on padding, so that libraries are initialised before the
        capture.
        """
        with translated(f"running {graph} before its capture"), torch.inference_mode():
            self._context.meet(self._npu.device)
            self._buffers.write_padding(graph)
            if graph.mode == "FULL":
                for forward in itertools.chain(*self._work.forwards(graph).values()):
                    forward(None)
            else:
                metadata = self._work.metadata_of_padding(graph)
                hidden = self._work.run_pieces(graph, metadata, run_directly)
                self._model.logits(hidden[:1])
        self._npu.synchronize()

    def capture(self, graph: BatchDescriptor) -> CaptureCost:
        """Capture one bucket and return its cost.

        Raises:
            StreamExhaustedError, OutOfDeviceMemoryError, CaptureError: the capture failed; its
                streams and memory are released.
        """
        if graph.mode == "FULL":
            addresses = self._buffers.addresses
            return self._graphs.capture_whole(graph, self._work.forwards(graph), addresses)
        metadata = self._work.metadata_of_padding(graph)
        return self._graphs.capture_pieces(
            graph, lambda pieces: self._work.run_pieces(graph, metadata, pieces.capture)
        )

    def commit(self, graph: BatchDescriptor) -> None:
        """Allow steps to replay a graph, because every rank has captured this graph."""
        self._graphs.commit(graph)

    def release(self, graph: BatchDescriptor) -> None:
        """Release the graphs of a bucket, committed or not; do nothing if there are none."""
        self._replays.forget()
        self._graphs.release(graph)

    @property
    def free_streams(self) -> int | None:
        """See ``GraphStore.free_streams``."""
        return self._graphs.free_streams

    @property
    def pool_memory(self) -> PoolMemory:
        """Memory that all captured graphs use together."""
        return self._graphs.pool_memory

    # ---- steps

    def launch(self, plan: RankPlan, rank: int, report: Callable[[StepResult], None]) -> None:
        """Queue a step on the device, behind the steps that are already in flight.

        Args:
            report: a function that gets the result of each earlier step that has ended. If the
                maximum number of steps is in flight, the method first waits for the oldest step.
        """
        watch = self._watch
        if not self._flights:
            self._counts.skip()
        watch.start()
        self._replays.forget()
        batch = plan.batch
        self._batch.apply(batch)
        if self._samples:
            for start in batch.started:
                self._matchers.begin(start.row, start.sampling)
        watch.lap("rows")
        records = unpack_ints(batch.scheduled, 4)

        land = partial(self._flights.land, records)
        # If the previous step ends during this call, its result is also reported during this call.
        answer = partial(self._flights.report_ended, report)
        with translated(f"step {plan.step}"), torch.inference_mode():
            if self._drafts is not None and (plan.graph is None or not plan.graph.query_len):
                begins = land()
                records = records.copy()
                records[:, 1] += begins
            if batch.cleaned:
                self.caches.clean(unpack_ints(batch.cleaned))
            if self._states is not None and batch.started:
                states = self.caches.state_tensors()
                self._states.begin([start.row for start in batch.started], states)
                if batch.restored:
                    self._states.restore(batch.restored, states)
            inputs = self._batch.step_inputs(records, moves=bool(self._flights))
            if self._samples:
                self._output.count_tokens(batch, inputs, self._tokens_at)
            # ``is_queued`` is false in eager steps: too little work may be queued at that time.
            answer_early = partial(answer, is_queued=plan.graph is not None)
            flight = self._run(plan, rank, inputs, land, answer_early)
            self._batch.note_samples(inputs)
        watch.lap("sample")
        answer("sample")
        self._flights.add(flight)
        if len(self._flights) == self._max_in_flight:
            report(self.finish())

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._flights)

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight; return its result.

        When this method returns, the device has sampled the step's tokens, but may still compute
        drafts. A device fault before the end of sampling is attributed to this step. A device fault
        during the drafting is attributed to the next step.
        """
        return self._flights.finish()

    def forget_steps(self) -> None:
        """Drop all steps in flight after an abort of the device; graphs and caches stay.

        Waits for the device. The next plan must contain all requests of the batch again.

        Raises:
            DeviceError: the device does not work after the abort.
        """
        self._flights.forget()
        if self._copier is not None:
            self._copier.forget()
        self._replays.forget()
        self._buffers.forget()
        self._output.forget()
        with translated("bringing the device back"):
            self._graphs.forget(runtime().current_stream())
            self._flights.forget_unplaced()
        self._npu.synchronize()

    def close(self) -> None:
        """Release graphs and caches. The device must be aborted and restarted before this call.

        Raises:
            DeviceError: the device does not work after the abort.
        """
        self._flights.forget()
        if self._copier is not None:
            self._copier.close()
        self._replays.forget()
        with translated("giving graphs and cache back"):
            self._graphs.release_all()
            self.caches.free()

    def copy_blocks(self, jobs: Sequence[CopyJob]) -> list[tuple[int, int]]:
        """Begin the copy jobs ``jobs``, and continue earlier jobs; see ``BlockCopier.advance``.

        Raises:
            DeviceError: the device failed.
        """
        if self._copier is None:
            return []
        with translated("copying KV blocks"), torch.inference_mode():
            self._copier.begin(jobs)
            return self._copier.advance()

    def num_read(self) -> dict[str, int]:
        """Return, for each tier, how many KV blocks were read from the tier's files."""
        return {} if self._copier is None else self._copier.num_read

    def end_copies(self, timeout_s: float) -> None:
        """Wait until this rank uses no files with copies of KV. No step may run after this call."""
        if self._copier is not None:
            self._copier.end_files(timeout_s)

    def prepare_next(self, is_wanted_elsewhere: Callable[[], bool]) -> None:
        """Send guessed KV lengths of the next step to graphs until the argument returns true."""
        with translated("sending lengths ahead"):
            self._replays.send_ahead(is_wanted_elsewhere)

    def _run(
        self,
        plan: RankPlan,
        rank: int,
        inputs: HostStep,
        land: Callable[[], IntArray],
        answer: Callable[[str], None],
    ) -> QueuedStep:
        """Queue the decoder, sampling and drafts."""
        if plan.graph is None:
            return self._run_mixed(plan, rank, inputs, None, land, partial(answer, "forward"))
        captured = self._graphs.find(plan.graph, plan.largest.kv_len)
        if plan.exchange != self._choose_exchange(plan.graph.num_tokens):
            raise ReplayMismatchError(
                f"the plan asks for {plan.graph} with exchange {plan.exchange}; it was captured "
                f"with {self._choose_exchange(plan.graph.num_tokens)}"
            )
        self._watch.lap("inputs")
        self._buffers.write(plan.graph, inputs)
        self._watch.lap("upload")
        samples_in_graph = self._drafts is None or plan.graph.query_len > 0
        if isinstance(captured, CapturedPieces) or not samples_in_graph:
            return self._run_mixed(plan, rank, inputs, captured, land, partial(answer, "forward"))
        decoder, *drafts = captured
        span = self._replays.begin(captured, inputs)
        self._replays.replay(decoder)
        if drafts and self._flights:
            # While the host waits here, the device runs all work before the first attention
            # operator, which waits for its lengths.
            inputs = replace(inputs, kv_lens=inputs.kv_lens + land())
            self._replays.correct(inputs)
        between = partial(answer, "update")
        self._replays.update(decoder, between)
        self._know_tokens(inputs, land, between)
        sampled = self._sample_whole(plan.graph, inputs, span)
        flight = self._flights.queue_output(plan, rank, inputs, sampled)
        for graph in drafts:
            self._replays.replay(graph)
            self._replays.update(graph, between)
        self._send_drafts()
        self._replays.end()
        if not drafts:
            self._replays.guess_next(inputs, 1)
        return flight

    def _sample_whole(
        self, graph: BatchDescriptor, inputs: HostStep, span: ReplaySpan | None
    ) -> Sampled:
        n = len(inputs.places)
        tokens, best = self._buffers.sampled[:n], self._buffers.best[:n]
        special = self._choose_special(inputs, self._buffers.logits[:n], tokens)
        if self._drafts is None:
            return Sampled(tokens, best, None, special, span)
        if special is not None:
            self._work.count_accepted(graph)
        return Sampled(tokens, best, self._buffers.accepted, special, span)

    def _run_mixed(
        self,
        plan: RankPlan,
        rank: int,
        inputs: HostStep,
        captured: Captured | None,
        land: Callable[[], IntArray],
        answer: Callable[[], None],
    ) -> QueuedStep:
        """Run any mixture of requests. ``MixedWork`` runs the decoder; all other work is eager.

        Args:
            answer: called between segments; reports the previous step if that step has ended.
        """
        mixed = self._mixed.run(plan, inputs, captured, answer)
        tokens, best = mixed.tokens, mixed.best
        self._know_tokens(inputs, land, answer)
        special = self._choose_special(inputs, mixed.logits, tokens)
        prompts = queue_prompts(
            self._npu, self._batch, inputs, mixed.hidden, self._model.logits, PROMPT_PLACES
        )
        num_places = 1 if self._drafts is None else self._drafts.num_places
        embeddings = queue_embeddings(self._npu, self._batch, inputs, mixed.places, num_places)
        if self._drafts is None:
            if self._max_in_flight > 1:
                self._work.tokens.latest[: len(tokens)].copy_(tokens)
            sampled = Sampled(tokens, best, None, special)
            return self._flights.queue_output(plan, rank, inputs, sampled, prompts, embeddings)
        accepted = self._drafts.count(tokens, mixed.step)
        sampled = Sampled(tokens, best, accepted, special, mixed.span)
        flight = self._flights.queue_output(plan, rank, inputs, sampled, prompts, embeddings)
        self._drafts.propose_mixed(
            mixed.step,
            inputs,
            mixed.metadata,
            mixed.hidden,
            tokens,
            accepted,
            plan.exchange,
            partial(self._mixed.collect, mixed.step.shared),
        )
        self._send_drafts()
        return flight

    def _choose_special(
        self, inputs: HostStep, logits: Tensor, tokens: Tensor
    ) -> SpecialPlaces | None:
        if not self._samples:
            return None
        masks = None
        if self._matchers.concern(inputs):
            masks = partial(self._matchers.masks, inputs, drafts=self._read_drafts())
        return self._output.choose_special(inputs, logits, tokens, masks)

    def _know_tokens(
        self, inputs: HostStep, land: Callable[[], IntArray], answer: Callable[[], None]
    ) -> None:
        """If the masks of this step depend on tokens of the previous step, wait for the previous
        step and report its result. During this wait, the device can run this step's decoder.
        """
        if self._samples and self._flights and self._matchers.concern(inputs):
            land()
            answer()

    def _send_drafts(self) -> None:
        """Queue a copy of the drafts to the host, if the next step's masks depend on them."""
        if self._landing_drafts is not None and not self._matchers.is_empty:
            assert self._drafts is not None
            self._landing_drafts.send(self._drafts.drafts)

    def _read_drafts(self) -> IntArray | None:
        return None if self._landing_drafts is None else self._landing_drafts.read()
