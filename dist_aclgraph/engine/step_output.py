"""From a step's logits to what the engine is told: the one place where the host waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.race_noise import RaceNoise
from dist_aclgraph.engine.sampler import choose_tokens, report_logprobs
from dist_aclgraph.engine.sampling_table import SamplingPlaces
from dist_aclgraph.engine.token_counts import TokenCounts
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankBatch, RowLogprobs

# Of decoder and drafts: tokens computed, tokens without room. Each is alone in 32 bytes, what
# operators load at once.
TALLY_SHAPE = (2, 2, 4)


@dataclass(frozen=True)
class SpecialPlaces:
    """Places that want something else than the most probable token, and what they got.

    Attributes:
        indices: [n], among all places of the step.
        logits: [n, vocab]; chosen: [n] int32.
    """

    indices: npt.NDArray[np.intp]
    places: SamplingPlaces
    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class HostOutput:
    """What a step brought.

    Attributes:
        token_ids: [num_new], request by request.
        counts: [num_samples], how many each request got.
        expert_tokens: what this rank's experts have computed since the start.
        num_unplaced: tokens of the decoder that found no room since the start.
    """

    token_ids: IntArray
    counts: IntArray
    expert_tokens: int
    num_unplaced: int


class StepOutput:
    """Owns the pinned memory that results are copied to, and the counts that penalties need."""

    def __init__(
        self, npu: Npu, batch: InputBatch, max_samples: int, num_drafts: int, vocab_size: int
    ) -> None:
        self._npu = npu
        self._batch = batch
        self._num_places = num_drafts + 1
        self._tokens = npu.pinned((max_samples * self._num_places,), torch.int32)
        self._accepted = npu.pinned((max_samples,), torch.int32)
        self._tally = npu.pinned(TALLY_SHAPE, torch.int64)
        self._stream = runtime().current_stream()
        self._ready: Any = runtime().Event()
        self._counts = TokenCounts(max_samples, vocab_size, npu.device, npu.upload)
        self._noise = RaceNoise(vocab_size, npu.upload)

    def count_tokens(self, batch: RankBatch) -> None:
        """Take in the tokens that a step's rows began with, or got since the last one."""
        for start in batch.started:
            if start.sampling.has_penalties:
                tokens = unpack_ints(start.token_ids)
                self._counts.begin(start.row, tokens, start.sampling.num_prompt_tokens)
        if batch.appended and not self._batch.sampling.may_draft.all():
            rows, tokens = unpack_ints(batch.appended, 2).T
            is_counted = ~self._batch.sampling.may_draft[rows]
            if is_counted.any():
                self._counts.add(rows[is_counted], tokens[is_counted])

    def choose_special(
        self, inputs: HostStep, logits: Tensor, tokens: Tensor
    ) -> SpecialPlaces | None:
        """Sample the places that need it, and put what they got among ``tokens``.

        Args:
            logits: [num_samples * (k + 1), vocab].
            tokens: [num_samples * (k + 1)] int32, the most probable ones.
        """
        batch, sampled_rows = self._batch, inputs.sampled_rows
        is_special = ~batch.sampling.is_plain[sampled_rows]
        if not is_special.any():
            return None
        indices = np.flatnonzero(np.repeat(is_special, self._num_places))
        samples, drafts = np.divmod(indices, self._num_places)
        rows = sampled_rows[samples]
        # What repeats a request's last place is sampled like it.
        drafts = np.minimum(drafts, inputs.num_logits[samples] - 1)
        positions = (batch.num_tokens[rows] + drafts).astype(np.int32)
        places = batch.sampling.places(rows, positions)
        where = self._npu.upload(indices.astype(np.int32))
        if len(indices) < len(logits):
            logits = logits.index_select(0, where)
        chosen = choose_tokens(logits, places, self._counts, self._noise, self._npu.upload)
        tokens.index_copy_(0, where.long(), chosen)
        return SpecialPlaces(indices, places, logits, chosen)

    def read(
        self,
        num_samples: int,
        tokens: Tensor,
        accepted: Tensor | None,
        tally: Tensor | None,
        while_waiting: Callable[[Callable[[], bool]], None],
    ) -> HostOutput:
        """Wait for the device and return what it made.

        Args:
            tokens: [>= num_samples * (k + 1)] int32.
            accepted: [>= num_samples] int32, how many drafts passed; None without drafts.
            tally: of TALLY_SHAPE, int64; None where it does not change.
            while_waiting: what the host does until its argument says that the device is done.
        """
        num_places = num_samples * self._num_places
        self._tokens[:num_places].copy_(tokens[:num_places], non_blocking=True)
        if accepted is not None:
            self._accepted[:num_samples].copy_(accepted[:num_samples], non_blocking=True)
        if tally is not None:
            self._tally.copy_(tally, non_blocking=True)
        self._ready.record(self._stream)
        while_waiting(self._ready.query)
        with self._npu.waiting():
            self._ready.synchronize()
        chosen = self._tokens[:num_places].numpy()
        counts = np.ones(num_samples, np.int32)
        if accepted is not None:
            counts += self._accepted[:num_samples].numpy()
            chosen = chosen.reshape(num_samples, self._num_places)
            chosen = chosen[np.arange(self._num_places) < counts[:, None]]
        read = self._tally.numpy()[..., 0]
        return HostOutput(chosen.copy(), counts, int(read[:, 0].sum()), int(read[0, 1]))

    def logprobs(
        self, special: SpecialPlaces | None, counts: IntArray
    ) -> tuple[RowLogprobs | None, ...]:
        """Return a report for each new token, or nothing where nobody asked."""
        if special is None:
            return ()
        reports = report_logprobs(special.logits, special.chosen, special.places, self._npu.upload)
        if not reports:
            return ()
        by_place: list[RowLogprobs | None] = [None] * (len(counts) * self._num_places)
        for index, report in reports.items():
            by_place[special.indices[index]] = report
        kept = np.arange(self._num_places) < counts[:, None]
        return tuple(by_place[index] for index in np.flatnonzero(kept))
