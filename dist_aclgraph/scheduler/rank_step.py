"""A step of one data-parallel rank: mutable while it is decided, then fixed until its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np

from dist_aclgraph.context.prompt_split import largest_share
from dist_aclgraph.errors import WorkerError
from dist_aclgraph.ints import IntArray, unpack_ints
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.rows import EVERY, Indices, Places, RunningRows
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs, RowStart, StepResult

NO_INTS: IntArray = np.empty(0, np.int32)
StepKind = Literal["mixed", "decode", "prompt"]


class NewTokens(NamedTuple):
    """The results of a step on one data-parallel rank.

    Attributes:
        token_ids: [num_new], request by request.
        counts: [num_samples], tokens of each sampled request; None means one each.
        logprobs: [num_new], or empty.
        non_finite: [n], indices, among the sampled requests, of those whose tokens are meaningless.
        prompts: log-probabilities of prompts, of requests that want them.
    """

    token_ids: IntArray
    counts: IntArray | None
    logprobs: tuple[RowLogprobs | None, ...]
    non_finite: IntArray = NO_INTS
    prompts: tuple[PromptLogprobs, ...] = ()

    def cut(self, kept: IntArray) -> NewTokens:
        """Return the first tokens of each request.

        Args:
            kept: [num_samples], number of kept tokens; requests with none are omitted.
        """
        counts = np.ones(len(kept), np.int32) if self.counts is None else self.counts
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        is_kept = np.arange(len(self.token_ids)) - starts < np.repeat(kept, counts)
        logprobs = tuple(compress(self.logprobs, is_kept))
        left = None if self.counts is None else kept[kept > 0]
        return NewTokens(self.token_ids[is_kept], left, logprobs)


@dataclass
class _Chunk:
    """The next tokens of an unsampled request."""

    index: int  # among the running requests
    length: int
    left: int  # tokens behind the chunk that may run with it
    replayed: int  # known tokens behind those; each of them runs in its own step

    @property
    def samples(self) -> bool:
        return self.left == self.replayed == 0


@dataclass
class StepBuilder:
    """Collects the work of one rank: requests that decode, then chunks of prompts.

    Attributes:
        decoding: [num_decoding], indices of the requests that decode; each runs ``decode_len``
            tokens.
        budget: tokens that the step may still take.
        max_chunk: tokens of one prompt, while other requests want to run.
        is_open: whether requests may be started.
        unserved: indices of unsampled running requests, in order.
        num_prompt_ranks: ranks that split prompts.
        kind: what the step may run: anything; requests behind their prompts; a chunk of one prompt.
    """

    rows: RunningRows
    decoding: Indices
    num_decoding: int
    decode_len: int
    budget: int
    max_chunk: int
    is_open: bool
    unserved: deque[int]
    num_prompt_ranks: int = 1
    kind: StepKind = "mixed"
    blocks: list[int] = field(default_factory=list)  # flat: row, index in the table, block id
    started: list[RowStart] = field(default_factory=list)
    _chunks: list[_Chunk] = field(default_factory=list)

    def add_chunk(self, index: int) -> None:
        """Let a request run its next tokens, up to its share of the step."""
        rows, computed = self.rows, int(self.rows.computed[index])
        end = max(int(rows.prompt_end[index]), computed + 1)
        length = min(end - computed, self.max_chunk, self.budget)
        if length > 0:
            self.budget = 0 if self.kind == "prompt" else self.budget - length
            left, replayed = end - computed - length, int(rows.known[index]) - end
            self._chunks.append(_Chunk(index, length, left, replayed))

    def serve_chunks(self, before: Request | None = None) -> None:
        """Serve unsampled running requests in order: those before a waiting request, or all."""
        while self.unserved and self.budget > 0:
            index = self.unserved[0]
            if before is not None and self.rows.requests[index].order > before.order:
                return
            self.unserved.popleft()
            self.add_chunk(index)

    @property
    def has_work(self) -> bool:
        """Whether anything runs in the step."""
        return bool(self.num_decoding or self._chunks)

    @property
    def is_steady(self) -> bool:
        """Whether all running requests decode, and nothing else runs."""
        return self.decoding is EVERY and not self._chunks

    def build(self) -> RankStep:
        """Return the step. Unused room goes to the prompts that are served first."""
        if self.kind == "decode":  # a graph samples its first requests
            self._chunks.sort(key=lambda chunk: not chunk.samples)
        for chunk in self._chunks:
            more = min(chunk.left, self.budget)
            chunk.length += more
            chunk.left -= more
            self.budget -= more
        rows, indices, num_decoding = self.rows, self.decoding, self.num_decoding
        if isinstance(indices, slice):  # excludes requests that arrive while the step runs
            indices = slice(0, num_decoding)
        if self._chunks:
            decoding = np.arange(len(rows))[self.decoding][:num_decoding]
            indices = np.append(decoding, [chunk.index for chunk in self._chunks])
        records = np.empty((num_decoding + len(self._chunks), 4), np.int32)
        records[:, 0] = rows.row[indices]
        records[:, 1] = rows.computed[indices]
        records[:, 2:] = self.decode_len
        records[num_decoding:, 2] = [chunk.length for chunk in self._chunks]
        records[num_decoding:, 3] = [chunk.samples for chunk in self._chunks]
        return RankStep(
            indices,
            records,
            num_decoding,
            self.decode_len,
            self.num_prompt_ranks,
            is_uniform=self.kind == "decode",
            reports_prompts=any(
                rows.requests[chunk.index].sampling.prompt_logprobs >= 0 for chunk in self._chunks
            ),
        )


@dataclass(frozen=True)
class RankStep:
    """The work of one rank in a step.

    Attributes:
        indices: [num_reqs], indices among the running requests when it was built.
        records: [num_reqs, 4], as in ``RankBatch.scheduled``.
        num_decoding: the first so many requests decode.
        decode_len: tokens of a request that decodes: its last one, and its drafts.
        num_prompt_ranks: ranks that split prompts.
        is_uniform: whether the other requests replay their output in the same shape.
        reports_prompts: whether logits of a prompt are wanted, which no full graph computes.
    """

    indices: Indices
    records: IntArray
    num_decoding: int
    decode_len: int
    num_prompt_ranks: int = 1
    is_uniform: bool = False
    reports_prompts: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.records)

    @cached_property
    def num_logits(self) -> IntArray:
        """[num_samples], number of sampled positions of each sampled request."""
        logits = self.records[:, 3]
        return logits[logits > 0]

    @cached_property
    def num_positions(self) -> int:
        """Number of sampled positions of all requests."""
        return int(self.num_logits.sum())

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Return three numbers: tokens of the largest share of a rank, requests, and the query
        length if all requests have the same, else 0.

        Only decode steps have a query length. A step of prompts of equal length has 0, because it
        samples at other places.
        """
        lengths = self.records[:, 2]
        query_len = int(lengths[0])
        has_prompts = self.num_decoding < self.num_reqs and not self.is_uniform
        if has_prompts and (
            query_len in (1, self.decode_len) or bool((lengths != query_len).any())
        ):
            query_len = 0
        return largest_share(lengths, self.num_prompt_ranks), self.num_reqs, query_len

    def read(self, result: StepResult) -> NewTokens:
        """Return the sampled tokens of the rank that owns this step's output.

        Raises:
            WorkerError: it is not what was asked for.
        """
        tokens, limits = unpack_ints(result.token_ids), self.num_logits
        if not result.counts and self.num_positions == len(limits):
            if len(tokens) != len(limits):
                raise self._mismatch(result, f"{len(tokens)} tokens")
            counts = None
        else:
            counts = self._counts(result, tokens)
        if not all(0 <= prompt.place < self.num_reqs for prompt in result.prompts):
            raise self._mismatch(result, "prompts of other requests")
        non_finite = self._non_finite(result)
        return NewTokens(tokens, counts, result.logprobs, non_finite, result.prompts)

    def _counts(self, result: StepResult, tokens: IntArray) -> IntArray:
        limits = self.num_logits
        counts = unpack_ints(result.counts)
        if not (
            len(counts) == len(limits)
            and int(counts.sum()) == len(tokens)
            and bool(((counts >= 1) & (counts <= limits)).all())
        ):
            raise self._mismatch(result, f"{len(tokens)} tokens in counts {counts.tolist()}")
        return counts

    def _non_finite(self, result: StepResult) -> IntArray:
        if not result.non_finite:
            return NO_INTS
        indices = unpack_ints(result.non_finite)
        if not bool(((indices >= 0) & (indices < len(self.num_logits))).all()):
            raise self._mismatch(result, f"no finite logits of requests {indices.tolist()}")
        return indices

    def _mismatch(self, result: StepResult, brought: str) -> WorkerError:
        return WorkerError(
            f"step {result.step} brought {brought}, {len(self.num_logits)} requests were sampled "
            f"at {self.num_positions} positions",
            result.rank,
            "SERVING",
        )


@dataclass
class Flight:
    """A step of one rank, from its decision to its result.

    Attributes:
        indices: [num_reqs], current indices of its requests among the running ones; -1 for a
            request that has left.
        is_quiet: whether no request can end by its length, or fill a block, in it.
        cleaned: blocks that are cleaned before it.
    """

    step: RankStep
    indices: Indices
    is_quiet: bool
    cleaned: Sequence[int] = ()

    @property
    def places(self) -> Places:
        """[num_reqs], ``indices`` as an array, also if it is a slice."""
        at = self.indices
        return np.arange(self.step.num_reqs) if isinstance(at, slice) else at

    def move(self, moves: Places) -> None:
        """Update the indices after some running requests have left."""
        places = self.places
        self.indices = np.where(places < 0, -1, moves[places])


def largest_of(steps: Sequence[RankStep]) -> tuple[int, int, int]:
    """Return tokens, requests and uniform query length of a graph that is large enough for each of
    the steps.

    The query length is 0 if the steps differ in it.
    """
    if len(steps) == 1:
        return steps[0].shape
    num_tokens, num_reqs, query_lens = zip(*[step.shape for step in steps], strict=True)
    query_len = query_lens[0] if len(set(query_lens)) == 1 else 0
    return max(num_tokens), max(num_reqs), query_len
