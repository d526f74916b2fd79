"""The results of a step, in arrays for all requests together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dist_aclgraph.arrays.ints import IntArray, pack_ints
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.rows import Places
from dist_aclgraph.steps.delta import FinishReason, Note, RequestDelta, StepDeltas
from dist_aclgraph.steps.step import RowLogprobs

NO_INTS: IntArray = np.empty(0, np.int32)
NO_PLACES: Places = np.empty(0, np.intp)


class StepOutputs(Struct, frozen=True):
    """The new tokens that a step has sampled for its requests. Iterating over this object yields
    one delta for each request.

    Attributes:
        requests: [num_reqs], the requests that the step has sampled.
        keys: [num_reqs], the attribute ``key`` of each request.
        token_ids: [num_new], the new tokens of the first request, then of the second, and so on.
        ends: [num_reqs], for each request, the index in ``token_ids`` after its last token; None
            means that each request has one token.
        firsts: [n], indices of requests that got their first tokens.
        finish_reasons: the finish reasons of requests; the keys are the indices of these requests.
        logprobs: [num_new], for each new token, its log-probabilities, or None if its request wants
            none. Empty if no request wants log-probabilities.
        failed: the requests that end without a new token, and why: their logits were NaN or
            infinite, or their grammar reached a limit.
    """

    requests: Sequence[Request] = ()
    keys: IntArray = NO_INTS
    token_ids: IntArray = NO_INTS
    ends: IntArray | None = None
    firsts: Places = NO_PLACES
    finish_reasons: Mapping[int, FinishReason] = {}
    logprobs: tuple[RowLogprobs | None, ...] = ()
    failed: Sequence[tuple[Request, DistAclGraphError]] = ()

    @classmethod
    def joined(cls, parts: Sequence[StepOutputs]) -> StepOutputs:
        """Return the outputs of several data-parallel ranks, one after another."""
        if len(parts) == 1:
            return parts[0]
        ends = None
        if any(part.ends is not None for part in parts):
            counts = [np.diff(part.each_end, prepend=0) for part in parts]
            ends = np.cumsum(np.concatenate(counts), dtype=np.int32)
        firsts, reasons, index = [NO_PLACES], dict[int, FinishReason](), 0
        for part in parts:
            if len(part.firsts):
                firsts.append(part.firsts + index)
            for place, reason in part.finish_reasons.items():
                reasons[index + place] = reason
            index += len(part.requests)
        return cls(
            list(chain.from_iterable(part.requests for part in parts)),
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            ends,
            np.concatenate(firsts),
            reasons,
            tuple(report for part in parts for report in part.each_logprobs)
            if any(part.logprobs for part in parts)
            else (),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def each_end(self) -> IntArray:
        """Return ``ends`` as an array [num_reqs], even if ``ends`` is None."""
        return np.arange(1, len(self) + 1, dtype=np.int32) if self.ends is None else self.ends

    @property
    def each_logprobs(self) -> tuple[RowLogprobs | None, ...]:
        """Return ``logprobs`` as a tuple [num_new]. If ``logprobs`` is empty, all elements are
        None.
        """
        return self.logprobs or (None,) * self.num_tokens

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestDelta]:
        names = {index: request.request_id for index, request in enumerate(self.requests)}
        return self.deltas(np.arange(len(self), dtype=np.int32)).each(names)

    def deltas(self, numbers: IntArray, picked: Places | None = None) -> StepDeltas:
        """Return the message with the results of one client's requests.

        Args:
            numbers: [n], the numbers with which the client identifies its requests.
            picked: [n], ascending indices of the client's requests; None means all requests.
        """
        notes = self._notes()
        tokens, ends, logprobs = self.token_ids, self.ends, self.logprobs
        if picked is not None:
            places = np.searchsorted(picked, list(notes)).tolist()
            notes = {
                place: note
                for place, (index, note) in zip(places, notes.items(), strict=True)
                if place < len(picked) and picked[place] == index
            }
            tokens, ends, logprobs = self._pick(picked)
        return StepDeltas(
            pack_ints(numbers),
            pack_ints(tokens),
            b"" if ends is None else pack_ints(ends),
            tuple(replace(note, index=index) for index, note in notes.items()),
            logprobs,
        )

    def _notes(self) -> dict[int, Note]:
        """Return notes for requests that got their first token or have ended; the keys are indices
        of requests.
        """
        notes = {}
        firsts = dict.fromkeys(self.firsts.tolist())
        for index in firsts | dict.fromkeys(self.finish_reasons):
            request = self.requests[index]
            notes[index] = Note(
                index,
                max(0, request.num_cached_tokens),
                self.finish_reasons.get(index),
                prompt_logprobs=tuple(request.prompt_logprobs) if index in firsts else (),
                embedding=request.embedding,
                prefill_s=request.prefill_s if index in firsts else 0.0,
            )
        return notes

    def _pick(
        self, picked: Places
    ) -> tuple[IntArray, IntArray | None, tuple[RowLogprobs | None, ...]]:
        """Return the tokens, ends and log-probabilities of the requests with the indices
        ``picked``.
        """
        if self.ends is None:
            chosen = [self.logprobs[index] for index in picked.tolist()] if self.logprobs else ()
            return self.token_ids[picked], None, tuple(chosen)
        counts = np.diff(self.ends, prepend=0)
        is_picked = np.zeros(len(self), bool)
        is_picked[picked] = True
        keep = np.repeat(is_picked, counts)
        ends = np.cumsum(counts[picked], dtype=np.int32)
        return self.token_ids[keep], ends, tuple(compress(self.logprobs, keep))
