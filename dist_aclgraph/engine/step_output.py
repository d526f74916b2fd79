"""Turns a step's logits into the report for the engine. In a step, only this module makes the host
wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.device.npu import Npu, runtime
from dist_aclgraph.engine.embeddings import ComingEmbeddings
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.masks.matchers import Masking, Masks
from dist_aclgraph.engine.prompt_report import ComingPrompt
from dist_aclgraph.engine.sampling.bad_words import find_forbidden, forbid
from dist_aclgraph.engine.sampling.race_noise import RaceNoise
from dist_aclgraph.engine.sampling.sampler import (
    LOGPROBS_WIDTH,
    ComingLogprobs,
    choose_tokens,
    queue_logprobs,
)
from dist_aclgraph.engine.sampling.sampling_places import KnownPlaces, StepPlaces
from dist_aclgraph.engine.sampling.token_counts import TokenCounts
from dist_aclgraph.steps.host_step import NO_INTS, HostStep
from dist_aclgraph.steps.step import PromptLogprobs, RankBatch, RowLogprobs

# Axis 0: the counters of the decoder, then the counters of the next-token module. Axis 1: the
# number of computed tokens, then the number of tokens beyond the capacity of an exchange. Axis 2
# pads each number to 32 bytes, because operators load 32 bytes at once.
TALLY_SHAPE = (2, 2, 4)

# A number is NaN or infinite if all bits of its exponent are set.
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
EXPONENT_OF = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

TokensAt = Callable[[IntArray], Tensor]


@dataclass(frozen=True)
class SpecialPlaces:
    """The special places of a step, and their chosen tokens. A place is special if its token is not
    simply the most probable token, or if its request wants log-probabilities.

    Attributes:
        logits: [n, vocab], the logits of the special places.
        chosen: [n] int32, the chosen token of each place.
    """

    known: StepPlaces
    logits: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class HostOutput:
    """The results of a step.

    Attributes:
        token_ids: [num_new], the new tokens of the first sampled request, then of the second, and
            so on.
        counts: [num_samples], number of new tokens of each request.
        expert_tokens: number of tokens that this rank's experts have computed since the rank
            started. Tokens of this step's drafting are not counted yet.
        num_unplaced: number of tokens beyond the capacity of the decoder's exchanges since the rank
            started.
        logprobs: [num_new], for each new token, its log-probabilities, or None if its request wants
            none. Empty if no request wants log-probabilities.
        non_finite: [n], indices of sampled requests whose logits were not finite.
        prompts: the requested log-probabilities of prompts.
        embeddings: the requested hidden states, each float32 [hidden]; the keys are indices among
            the sampled requests.
    """

    token_ids: IntArray
    counts: IntArray
    expert_tokens: int
    num_unplaced: int
    logprobs: tuple[RowLogprobs | None, ...]
    non_finite: IntArray
    prompts: tuple[PromptLogprobs, ...]
    embeddings: dict[int, bytes]


class _Landing:
    """Pinned memory to which the results of one step are copied.

    Attributes:
        tokens: [max_samples * (k + 1)] int32, the sampled tokens.
        accepted: [max_samples] int32, number of accepted drafts of each request.
        best: [max_samples * (k + 1)], for each sampled token, the greatest of its logits, in the
            dtype of logits.
        tally: int64, of shape TALLY_SHAPE, counters of tokens at experts.
        arrays: ``tokens``, ``accepted`` and ``tally`` as NumPy arrays.
        bits: ``best`` as integers with the same bits.
        logprobs: [max_samples * (k + 1) * LOGPROBS_WIDTH] float32.
        ready: event recorded after the copies.
    """

    def __init__(self, npu: Npu, max_samples: int, num_places: int, dtype: torch.dtype) -> None:
        self.tokens = npu.pinned((max_samples * num_places,), torch.int32)
        self.accepted = npu.pinned((max_samples,), torch.int32)
        self.best = npu.pinned((max_samples * num_places,), dtype)
        self.tally = npu.pinned(TALLY_SHAPE, torch.int64)
        num_logprobs = max_samples * num_places * LOGPROBS_WIDTH
        self.logprobs = npu.pinned((num_logprobs,), torch.float32)
        self.arrays = self.tokens.numpy(), self.accepted.numpy(), self.tally.numpy()
        self.bits = self.best.view(BITS_OF[dtype]).numpy()
        self.ready: Any = runtime().Event()


@dataclass(frozen=True)
class ComingOutput:
    """The results of a step, whose copies to the host are queued."""

    landing: _Landing
    num_samples: int
    has_accepted: bool
    special: SpecialPlaces | None
    logprobs: ComingLogprobs | None
    prompts: Sequence[ComingPrompt]
    embeddings: ComingEmbeddings | None


class StepOutput:
    """Owns the pinned memory for results, and the sampling state on the device.

    Args:
        steps_in_flight: maximum number of steps whose results the host has not read yet.
    """

    def __init__(
        self,
        npu: Npu,
        batch: InputBatch,
        max_samples: int,
        num_drafts: int,
        vocab_size: int,
        dtype: torch.dtype,
        steps_in_flight: int = 1,
    ) -> None:
        self._npu = npu
        self._batch = batch
        self._num_places = num_drafts + 1
        self._landings = [
            _Landing(npu, max_samples, self._num_places, dtype) for _ in range(steps_in_flight)
        ]
        self._exponent = EXPONENT_OF[dtype]
        self._num_queued = 0
        # ``_coming_rows``: the rows that have bad words, and whose latest tokens are not on the
        # host, because a step in flight samples these tokens. ``_coming``: these tokens.
        self._coming_rows = NO_INTS
        self._coming: Tensor | None = None
        self._stream = runtime().current_stream()
        # For each row, the number of its tokens that ``_counts`` has counted.
        self._counted: IntArray = np.zeros(max_samples, np.int32)
        self._counts = TokenCounts(max_samples, vocab_size, npu.device, npu.upload)
        self._masking = Masking(npu.upload)
        self._noise = RaceNoise(vocab_size, npu.upload)
        self._known = KnownPlaces(batch.sampling, self._num_places, vocab_size, npu.upload)

    def count_tokens(self, batch: RankBatch, step: HostStep, token_ids: TokensAt) -> None:
        """Update the counts of tokens that penalties need: for new rows, count all tokens; for
        other rows, count the latest tokens.

        Args:
            token_ids: takes [n] references; returns the tokens for which the references stand, [n]
                int32 on the device.
        """
        rows = self._batch
        for start in batch.started:
            if start.sampling.has_penalties:
                tokens = unpack_ints(start.token_ids)
                self._counts.begin(start.row, tokens, start.sampling.num_prompt_tokens)
                self._counted[start.row] = len(tokens)
        if rows.sampling.all_may_draft:
            return
        self._find_last(step, token_ids)
        penalised = np.flatnonzero(rows.sampling.has_penalties).astype(np.int32)
        # A row can have several new tokens. Each pass of the loop counts one token of each row.
        while len(late := penalised[self._counted[penalised] < rows.num_tokens[penalised]]):
            self._counts.add(late, self._npu.upload(rows.token_ids[late, self._counted[late]]))
            self._counted[late] += 1
        coming = rows.coming_tokens(step, rows.sampling.has_penalties)
        if coming is not None:
            self._counts.add(coming.rows, token_ids(coming.references))
            self._counted[coming.rows] += 1

    def _find_last(self, step: HostStep, token_ids: TokensAt) -> None:
        """For rows with bad words, copy the latest tokens that the host does not have. Later, this
        step overwrites the original tokens on the device.
        """
        self._coming_rows, self._coming = NO_INTS, None
        words = self._batch.sampling.bad_words
        if words:
            has_words = np.zeros(len(self._counted), bool)
            has_words[list(words)] = True
            coming = self._batch.coming_tokens(step, has_words)
            if coming is not None:
                self._coming_rows = coming.rows
                self._coming = token_ids(coming.references)

    def _forbid_words(self, step: HostStep, known: StepPlaces, logits: Tensor) -> Tensor:
        """Return the logits of the step's ``SpecialPlaces``, with -inf for last tokens of bad
        words.
        """
        batch = self._batch
        if not batch.sampling.bad_words:
            return logits
        rows = step.sampled_rows[known.samples]
        forbidden = find_forbidden(
            batch.sampling.bad_words,
            rows,
            known.positions(step),
            batch.token_ids,
            batch.num_tokens,
            batch.sampling.settings(rows)["num_prompt_tokens"],
            self._coming_rows,
        )
        if forbidden is None:
            return logits
        return forbid(logits, forbidden, self._coming, self._npu.upload)

    def choose_special(
        self,
        inputs: HostStep,
        logits: Tensor,
        tokens: Tensor,
        masks_of: Callable[[StepPlaces], Masks | None] | None = None,
    ) -> SpecialPlaces | None:
        """Sample the places whose tokens are not simply the most probable tokens
        (``SpecialPlaces``), and write the chosen tokens into ``tokens``.

        Args:
            logits: [num_samples * (k + 1), vocab]. If rows have masks, this method may set the
                logits of forbidden tokens to -inf in place.
            tokens: [num_samples * (k + 1)] int32, the most probable tokens.
            masks_of: returns the masks of the special places; None if no row has a mask.
        """
        known = self._known.find(inputs.sampled_rows)
        if known is None:
            return None
        places, where = known.places, known.where
        if where is not None:
            logits = logits.index_select(0, where)
        positions = known.positions(inputs) if places.depends_on_positions else NO_INTS
        masks = None if masks_of is None else masks_of(known)
        if masks is not None:
            self._masking.apply(logits, masks)
        forbid_words = partial(self._forbid_words, inputs, known)
        chosen = tokens if where is None else torch.empty_like(tokens[: len(known.indices)])
        choose_tokens(
            logits,
            places,
            positions,
            self._counts,
            self._noise,
            self._npu.upload,
            chosen,
            forbid_words,
        )
        if where is not None:
            tokens.index_copy_(0, where, chosen)
        return SpecialPlaces(known, logits, chosen)

    def forget(self) -> None:
        """Let the next step send all values to the device again. An abort of the device may have
        stopped the copies of earlier values.
        """
        self._known.forget()
        self._counts.forget()
        self._masking.forget()

    def queue(
        self,
        num_samples: int,
        tokens: Tensor,
        best: Tensor,
        accepted: Tensor | None,
        tally: Tensor | None,
        special: SpecialPlaces | None,
        prompts: Sequence[ComingPrompt] = (),
        embeddings: ComingEmbeddings | None = None,
    ) -> ComingOutput:
        """Queue copies of a step's results to the host; the host does not wait.

        Args:
            tokens: [>= num_samples * (k + 1)] int32, the sampled tokens; live requests come before
                padding.
            best: for each sampled token, the greatest of its logits.
            accepted: [>= num_samples] int32, number of accepted drafts; None if the deployment uses
                no drafts.
            tally: int64, of shape TALLY_SHAPE; None if the step does not change the counters.
            special: the special places, whose requests may want log-probabilities; None if the step
                has no special place.
            prompts: reports of prompts, whose copies are already queued.
            embeddings: hidden states of prompts; their copy is already queued.
        """
        landing = self._landings[self._num_queued % len(self._landings)]
        self._num_queued += 1
        num_places = num_samples * self._num_places
        landing.tokens[:num_places].copy_(tokens[:num_places], non_blocking=True)
        landing.best[:num_places].copy_(best[:num_places], non_blocking=True)
        if accepted is not None:
            landing.accepted[:num_samples].copy_(accepted[:num_samples], non_blocking=True)
        if tally is not None:
            landing.tally.copy_(tally, non_blocking=True)
        logprobs = None
        asked = None if special is None else special.known.places.logprobs
        if special is not None and asked is not None:
            logprobs = queue_logprobs(special.logits, special.chosen, asked, landing.logprobs)
        landing.ready.record(self._stream)
        has_accepted = accepted is not None
        return ComingOutput(
            landing, num_samples, has_accepted, special, logprobs, prompts, embeddings
        )

    def is_here(self, coming: ComingOutput) -> bool:
        """Whether a step's results are complete, so that ``read`` would not wait."""
        return bool(coming.landing.ready.query())

    def read(
        self, coming: ComingOutput, while_waiting: Callable[[Callable[[], bool]], None]
    ) -> HostOutput:
        """Wait for a step and return its results.

        Args:
            while_waiting: function that does other work of the host. The function is called before
                the wait. Its argument is a function that returns whether the results have arrived.
        """
        landing, num_samples = coming.landing, coming.num_samples
        while_waiting(landing.ready.query)
        with self._npu.waiting():
            landing.ready.synchronize()
        tokens, accepted, tally = landing.arrays
        chosen = tokens[: num_samples * self._num_places]
        counts = np.ones(num_samples, np.int32)
        if coming.has_accepted:
            counts += accepted[:num_samples]
            chosen = chosen.reshape(num_samples, self._num_places)
            chosen = chosen[np.arange(self._num_places) < counts[:, None]]
        return HostOutput(
            chosen.copy(),
            counts,
            int(tally[0, 0, 0] + tally[1, 0, 0]),
            int(tally[0, 1, 0]),
            self._logprobs(coming, counts),
            self._non_finite(coming, counts),
            tuple(prompt.read() for prompt in coming.prompts),
            {} if coming.embeddings is None else coming.embeddings.read(),
        )

    def _non_finite(self, coming: ComingOutput, counts: IntArray) -> IntArray:
        """Return the indices of sampled requests for which a new token was chosen from NaN or
        infinite logits.
        """
        num_places = coming.num_samples * self._num_places
        is_bad = coming.landing.bits[:num_places] & self._exponent == self._exponent
        if not is_bad.any():
            return NO_INTS
        is_bad = is_bad.reshape(-1, self._num_places)
        is_bad &= np.arange(self._num_places) < counts[:, None]
        return np.flatnonzero(is_bad.any(axis=1)).astype(np.int32)

    def _logprobs(self, coming: ComingOutput, counts: IntArray) -> tuple[RowLogprobs | None, ...]:
        """Return a report for each new token; empty if no request wants log-probabilities."""
        special, logprobs = coming.special, coming.logprobs
        if special is None or logprobs is None:
            return ()
        by_place: list[RowLogprobs | None] = [None] * (len(counts) * self._num_places)
        for index, report in logprobs.read().items():
            by_place[special.known.indices[index]] = report
        kept = np.arange(self._num_places) < counts[:, None]
        return tuple(by_place[index] for index in np.flatnonzero(kept))
