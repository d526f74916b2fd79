"""The steps that are queued on the device, and how their results reach the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray, pack_ints
from dist_aclgraph.device.npu import translated
from dist_aclgraph.device.step_measures import DeviceCounts, ReplaySpan, Stopwatch
from dist_aclgraph.engine.embeddings import ComingEmbeddings
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.masks.matchers import GrammarReport, Matchers
from dist_aclgraph.engine.prompt_report import ComingPrompt
from dist_aclgraph.engine.replays import Replays
from dist_aclgraph.engine.step_output import ComingOutput, HostOutput, SpecialPlaces, StepOutput
from dist_aclgraph.graphs.step_buffers import StepBuffers
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankPlan, StepResult


@dataclass(frozen=True)
class Sampled:
    """The queued work of a step, without its drafts.

    Attributes:
        tokens: [num_samples * (k + 1)] int32, the sampled tokens.
        best: [num_samples * (k + 1)], for each sampled token, the greatest of its logits.
        accepted: [num_samples] int32, number of accepted drafts of each request; None if the
            deployment uses no drafts.
        span: measures the replays of a full graph; None if replays are not measured.
    """

    tokens: Tensor
    best: Tensor
    accepted: Tensor | None
    special: SpecialPlaces | None
    span: ReplaySpan | None = None


@dataclass(frozen=True)
class QueuedStep:
    """A step that is queued on the device.

    Attributes:
        num_written: value of ``StepBuffers.num_written`` after this step's inputs were written.
        stages: the host's time in each stage of this step until now, in microseconds.
        grammars: the grammars that have failed in this step, or are not compiled yet.
    """

    plan: RankPlan
    rank: int
    inputs: HostStep
    coming: ComingOutput
    num_written: int
    stages: dict[str, float]
    span: ReplaySpan | None
    grammars: GrammarReport


@dataclass(kw_only=True, eq=False)
class StepsInFlight:
    """Owns the queued steps, oldest first. Queues the copy of a step's output to the host, waits
    for this copy, and builds the step's result. This class does not depend on how a step is
    computed.

    Attributes:
        tally: int64, of shape ``TALLY_SHAPE``, the counters of tokens at experts.
        owns_output: whether this rank sends the sampled tokens to the engine.
        has_drafts: whether the deployment uses drafts.
    """

    batch: InputBatch
    output: StepOutput
    buffers: StepBuffers
    replays: Replays
    matchers: Matchers
    watch: Stopwatch
    counts: DeviceCounts
    tally: Tensor
    owns_output: bool
    has_drafts: bool

    def __post_init__(self) -> None:
        self._flights: deque[QueuedStep] = deque()
        # Steps whose results were read, but not reported yet. The third element is the step's
        # ``waited_us``.
        self._ended: deque[tuple[QueuedStep, HostOutput, int]] = deque()
        # The time at which enough work was queued to keep the device busy after the oldest step; 0
        # if too little work is queued. ``waited_us`` is measured from this time.
        self._queued_s = 0.0
        # Number of accepted drafts in each row's last step.
        self._num_passed: IntArray = np.zeros_like(self.batch.num_tokens)
        # The value that was last read from the device's counter of tokens beyond the capacity of
        # the decoder's exchanges.
        self._num_unplaced = 0

    def __len__(self) -> int:
        return len(self._flights)

    def queue_output(
        self,
        plan: RankPlan,
        rank: int,
        inputs: HostStep,
        sampled: Sampled,
        prompts: Sequence[ComingPrompt] = (),
        embeddings: ComingEmbeddings | None = None,
    ) -> QueuedStep:
        """Queue the copy of a step's results to the host. Call this before the drafting is queued,
        so that the host gets the results while the device drafts. The step is in flight only after
        ``add``.

        Args:
            prompts: log-probabilities of prompts; their copies to the host are already queued.
            embeddings: hidden states of prompts; their copy to the host is already queued.
        """
        needs_tokens = self.owns_output or self.has_drafts or self.matchers.concern(inputs)
        coming = self.output.queue(
            inputs.num_samples if needs_tokens else 0,
            sampled.tokens,
            sampled.best,
            sampled.accepted,
            None if plan.exchange is None else self.tally,
            sampled.special if self.owns_output else None,
            prompts if self.owns_output else (),
            embeddings if self.owns_output else None,
        )
        num_written, stages = self.buffers.num_written, self.watch.stages
        grammars = self.matchers.take_report()
        return QueuedStep(plan, rank, inputs, coming, num_written, stages, sampled.span, grammars)

    def add(self, flight: QueuedStep) -> None:
        self._flights.append(flight)

    def land(self, records: IntArray) -> IntArray:
        """Wait for all steps in flight, and store their results until ``report_ended`` reports
        them.

        Args:
            records: [num_reqs, 4], for each request: row, num_computed_tokens,
                num_scheduled_tokens, num_logits.

        Returns:
            [num_reqs]: for each request whose last token was not yet on the host, the number of
            accepted drafts; 0 for the other requests.
        """
        self._note_queued()
        while self._flights:
            self._ended.append(self._read_oldest())
        return np.where(self.batch.in_flight(records), self._num_passed[records[:, 0]], 0)

    def report_ended(
        self, report: Callable[[StepResult], None], stage: str, *, is_queued: bool = True
    ) -> None:
        """Report the steps that have ended. This method does not wait for the device.

        Args:
            report: called with each result.
            stage: name of the stage of the next step on which the host works now.
            is_queued: whether enough work of the next step is queued to keep the device busy while
                the host queues the remaining work.
        """
        if is_queued:
            self._note_queued()
        if self._flights and self.output.is_here(self._flights[0].coming):
            self.watch.lap(stage)
            self._ended.append(self._read_oldest())
        while self._ended:
            report(self._result(*self._ended.popleft()))

    def finish(self) -> StepResult:
        """Wait for the oldest step; return its result."""
        return self._result(*self._read_oldest())

    def _note_queued(self) -> None:
        if self._flights and not self._queued_s:
            self._queued_s = time.perf_counter()

    def _read_oldest(self) -> tuple[QueuedStep, HostOutput, int]:
        """Wait for the oldest step; return its output, and ``StepResult.waited_us``.

        Raises:
            DeviceError: the device failed.
        """
        flight = self._flights.popleft()
        with translated(f"step {flight.plan.step}"), torch.inference_mode():
            read = self.output.read(flight.coming, self.replays.send_ahead)
        waited_us = int((time.perf_counter() - self._queued_s) * 1e6) if self._queued_s else 0
        self._queued_s = 0.0
        self.buffers.mark_read(flight.num_written)
        if self.matchers.concern(flight.inputs) and len(read.counts):
            self.matchers.note(flight.inputs, read.counts, read.token_ids)
        if self.has_drafts:
            self._num_passed[flight.inputs.sampled_rows] = read.counts - 1
            self.replays.guess_next(flight.inputs, read.counts)
        return flight, read, waited_us

    def _result(self, flight: QueuedStep, read: HostOutput, waited_us: int) -> StepResult:
        plan = flight.plan
        self.replays.book_wait(flight.span)
        self.watch.lap_of(flight.stages, "read")
        num_unplaced, self._num_unplaced = self._num_unplaced, read.num_unplaced
        result = StepResult(
            plan.epoch,
            plan.step,
            flight.rank,
            expert_tokens=read.expert_tokens,
            num_unplaced=self._num_unplaced - num_unplaced,
            unmasked=pack_ints(flight.grammars.unmasked),
            compiling=pack_ints(flight.grammars.compiling),
            waited_us=waited_us,
            timings_us=flight.stages,
            overlapped_us=self.watch.take_overlapped(),
            counted=self.counts.read_and_reset(),
        )
        if not self.owns_output:
            return result
        return msgspec.structs.replace(
            result,
            token_ids=pack_ints(read.token_ids),
            non_finite=pack_ints(read.non_finite),
            counts=pack_ints(read.counts) if self.has_drafts else b"",
            logprobs=read.logprobs,
            prompts=read.prompts,
            embeddings=read.embeddings,
            failed=flight.grammars.failed,
        )

    def forget(self) -> None:
        """Drop all steps after an abort of the device."""
        self._flights.clear()
        self._ended.clear()
        self._queued_s = 0.0
        self._num_passed[:] = 0

    def forget_unplaced(self) -> None:
        """Exclude the tokens of the aborted steps from ``num_unplaced`` of later results.

        The device's counter includes tokens of the aborted steps, so the counter's current value is
        subtracted from later values.
        """
        self._num_unplaced = int(self.tally[0, 1, 0])
