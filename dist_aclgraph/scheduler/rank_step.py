"""A step of one data-parallel rank. A step changes while it is built, and never afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from dist_aclgraph.arrays.ints import IntArray, unpack_ints
from dist_aclgraph.context.prompt_split import largest_share
from dist_aclgraph.errors import WorkerError
from dist_aclgraph.kv.checkpoints import BlockHash, Checkpoints
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.rows import EVERY, TRIES, Indices, Places, RunningRows
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs, RowStart, StepResult

NO_INTS: IntArray = np.empty(0, np.int32)
StepKind = Literal["mixed", "decode", "prompt"]


class StepShape(NamedTuple):
    """The numbers that decide which graph a step can replay, and how the step is padded.

    Attributes:
        num_tokens: number of tokens on the prefill rank with the most tokens.
        num_reqs: number of requests.
        query_len: number of tokens of every request; 0 if requests have different numbers of
            tokens.
        num_samples: number of requests that get tokens.
    """

    num_tokens: int
    num_reqs: int
    query_len: int
    num_samples: int


class NewTokens(NamedTuple):
    """The results of a step on one data-parallel rank.

    Attributes:
        token_ids: [num_new], the new tokens of the first sampled request, then of the second, and
            so on.
        counts: [num_samples], number of new tokens of each sampled request; None means that each of
            them has one new token.
        logprobs: [num_new], for each new token, its log-probabilities, or None if its request wants
            none. Empty if no request wants log-probabilities.
        non_finite: [n], the requests whose logits were NaN or infinite, as indices among the
            sampled requests. The tokens of these requests are meaningless.
        prompts: the requested log-probabilities of prompts.
        failed: why requests have failed. The keys are indices among the sampled requests; the
            values are reasons.
        embeddings: the requested hidden states, each float32 [hidden]; the keys are indices among
            the sampled requests.
    """

    token_ids: IntArray
    counts: IntArray | None
    logprobs: tuple[RowLogprobs | None, ...]
    non_finite: IntArray = NO_INTS
    prompts: tuple[PromptLogprobs, ...] = ()
    failed: Mapping[int, str] = MappingProxyType({})
    embeddings: Mapping[int, bytes] = MappingProxyType({})

    @property
    def is_plain(self) -> bool:
        """Whether each sampled request got exactly one token, and nothing else was reported."""
        return (
            self.counts is None
            and not len(self.non_finite)
            and not (self.logprobs or self.prompts or self.failed or self.embeddings)
        )

    def cut(self, kept: IntArray) -> NewTokens:
        """Return the results with only the first tokens of each request.

        Args:
            kept: [num_samples], how many tokens of each request are returned. A request with the
                number 0 is not in the result.
        """
        counts = np.ones(len(kept), np.int32) if self.counts is None else self.counts
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        is_kept = np.arange(len(self.token_ids)) - starts < np.repeat(kept, counts)
        logprobs = tuple(compress(self.logprobs, is_kept))
        left = None if self.counts is None else kept[kept > 0]
        return NewTokens(self.token_ids[is_kept], left, logprobs)


@dataclass
class Chunk:
    """The next known tokens of a request that has not sampled a token yet.

    Attributes:
        index: index of the request among the running requests.
        start: position of the first token.
        end: position after the last token that may run in this step.
        known: number of known tokens of the request.
        is_kept: whether the recurrent state at ``end`` is copied to a checkpoint.
    """

    index: int
    start: int
    length: int
    end: int
    known: int
    is_kept: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        return self.stop == self.known


@dataclass
class StepBuilder:
    """Collects the work of one rank: requests that decode, then chunks of prompts.

    Attributes:
        decoding: [num_decoding], indices of the requests that decode. Each of these requests runs
            ``decode_len`` tokens.
        budget: number of tokens that may still be added to the step.
        max_chunk: maximum number of tokens of one prompt in the step, as long as other requests
            want to run.
        is_open: whether the step may start waiting requests.
        unserved: indices of running requests that have not sampled a token, in order of service.
        num_prompt_ranks: number of ranks that split prompts.
        kind: the work that the step may contain. "mixed": any work; "decode": only requests whose
            prompts are computed; "prompt": only one chunk of a single prompt.
        checkpoints: the checkpoints of a model with recurrent state; None for other models. A chunk
            must end where the state is copied to a checkpoint.
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
    block_size: int = 1
    checkpoints: Checkpoints | None = None
    # Groups of three numbers: row, index in the table, block id.
    blocks: list[int] = field(default_factory=list)
    started: list[RowStart] = field(default_factory=list)
    restored: list[int] = field(default_factory=list)  # pairs: row, checkpoint
    chunks: list[Chunk] = field(default_factory=list)

    def add_chunk(self, index: int) -> None:
        """Add a request's next tokens to the step, at most ``max_chunk`` tokens."""
        rows, computed = self.rows, int(self.rows.computed[index])
        end = max(int(rows.prompt_end[index]), computed + 1)
        kept = end
        if self.checkpoints is not None:
            kept = self.checkpoints.next_position(computed, end, self.block_size)
        last = computed + 1 if rows.held[index] == TRIES else kept
        length = min(last - computed, self.max_chunk, self.budget)
        if length > 0:
            self.budget = 0 if self.kind == "prompt" else self.budget - length
            known = int(rows.known[index])
            self.chunks.append(Chunk(index, computed, length, last, known, last == kept < end))

    def serve_chunks(self, before: Request | None = None) -> None:
        """Add chunks of running requests that have not sampled a token, in order of service.

        Args:
            before: a waiting request. Only chunks of requests that are served before this request
                are added; if None, chunks of all requests are added.
        """
        while self.unserved and self.budget > 0:
            index = self.unserved[0]
            if before is not None and self.rows.requests[index].order > before.order:
                return
            self.unserved.popleft()
            self.add_chunk(index)

    @property
    def has_work(self) -> bool:
        """Whether at least one request runs in the step."""
        return bool(self.num_decoding or self.chunks)

    @property
    def is_steady(self) -> bool:
        """Whether all running requests decode in the step, and the step runs nothing else."""
        return self.decoding is EVERY and not self.chunks

    def build(self) -> RankStep:
        """Return the step. Chunks of the prompts that are served first get the unused tokens of
        ``budget``.
        """
        # A graph samples the first requests of its batch. So in a decode step, the sampled requests
        # come first.
        if self.kind == "decode":
            self.chunks.sort(key=lambda chunk: not chunk.samples)
        for chunk in self.chunks:
            more = min(chunk.end - chunk.stop, self.budget)
            chunk.length += more
            self.budget -= more
        rows, indices, num_decoding = self.rows, self.decoding, self.num_decoding
        if isinstance(indices, slice):  # the slice must not include requests that get a row later
            indices = slice(0, num_decoding)
        if self.chunks:
            decoding = np.arange(len(rows))[self.decoding][:num_decoding]
            indices = np.append(decoding, [chunk.index for chunk in self.chunks])
        records = np.empty((num_decoding + len(self.chunks), 4), np.int32)
        records[:, 0] = rows.row[indices]
        records[:, 1] = rows.computed[indices]
        records[:, 2:] = self.decode_len
        records[num_decoding:, 2] = [chunk.length for chunk in self.chunks]
        records[num_decoding:, 3] = [chunk.samples for chunk in self.chunks]
        return RankStep(
            indices,
            records,
            num_decoding,
            self.decode_len,
            self.num_prompt_ranks,
            is_uniform=self.kind == "decode",
            needs_hidden=any(map(self._needs_hidden, self.chunks)),
        )

    def _needs_hidden(self, chunk: Chunk) -> bool:
        sampling = self.rows.requests[chunk.index].sampling
        return sampling.prompt_logprobs >= 0 or (sampling.embeds and chunk.samples)


@dataclass(frozen=True)
class RankStep:
    """The work of one rank in a step.

    Attributes:
        indices: [num_reqs], indices among the running requests at the time of the decision.
        records: [num_reqs, 4], for each request: row, num_computed_tokens, num_scheduled_tokens,
            num_logits.
        num_decoding: number of requests that decode. Decoding requests are the first requests of
            the step.
        decode_len: number of tokens of a request that decodes: its last token and its drafts.
        num_prompt_ranks: number of ranks that split prompts.
        is_uniform: whether all requests run like decoding requests. If true, a request that is not
            decoding runs one token of its existing output.
        needs_hidden: whether a request wants log-probabilities of its prompt, or an embedding. Such
            a request needs hidden states that full graphs do not keep.
    """

    indices: Indices
    records: IntArray
    num_decoding: int
    decode_len: int
    num_prompt_ranks: int = 1
    is_uniform: bool = False
    needs_hidden: bool = False

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
    def shape(self) -> StepShape:
        """The shape of the step.

        If a prompt runs one token or ``decode_len`` tokens, ``query_len`` is 0. Such a step must
        not look like a decode step, because a prompt samples other positions than a decoding
        request.
        """
        lengths = self.records[:, 2]
        query_len = int(lengths[0])
        has_prompts = self.num_decoding < self.num_reqs and not self.is_uniform
        if has_prompts and (
            query_len in (1, self.decode_len) or bool((lengths != query_len).any())
        ):
            query_len = 0
        num_tokens = largest_share(lengths, self.num_prompt_ranks)
        return StepShape(num_tokens, self.num_reqs, query_len, len(self.num_logits))

    def read(self, result: StepResult) -> NewTokens:
        """Return the sampled tokens from ``result``, which comes from the worker that sends this
        rank's output.

        Raises:
            WorkerError: the result does not fit this step.
        """
        tokens, limits = unpack_ints(result.token_ids), self.num_logits
        if not result.counts and self.num_positions == len(limits):
            if len(tokens) != len(limits):
                raise self._mismatch(result, f"{len(tokens)} tokens")
            counts = None
        else:
            counts = self._counts(result, tokens)
        if result.prompts or result.failed or result.embeddings:
            self._check_indices(result)
        return NewTokens(
            tokens,
            counts,
            result.logprobs,
            self._samples(result, result.non_finite, "no finite logits"),
            result.prompts,
            result.failed,
            result.embeddings,
        )

    def _check_indices(self, result: StepResult) -> None:
        """Check that the result contains only indices of requests of this step."""
        num_samples = len(self.num_logits)
        if not all(0 <= prompt.place < self.num_reqs for prompt in result.prompts):
            raise self._mismatch(result, "prompts of other requests")
        if not all(0 <= index < num_samples for index in result.failed):
            raise self._mismatch(result, f"errors of requests {sorted(result.failed)}")
        if not all(0 <= index < num_samples for index in result.embeddings):
            raise self._mismatch(result, f"embeddings of requests {sorted(result.embeddings)}")

    def read_unmasked(self, result: StepResult) -> IntArray:
        """Return the requests that a worker has sampled without a mask, as indices among the
        sampled requests, [n].

        Raises:
            WorkerError: the result does not fit this step.
        """
        return self._samples(result, result.unmasked, "no masks")

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

    def _samples(self, result: StepResult, packed: bytes, brought: str) -> IntArray:
        """Unpack indices from a result, and check that they are indices of sampled requests."""
        if not packed:
            return NO_INTS
        indices = unpack_ints(packed)
        if not bool(((indices >= 0) & (indices < len(self.num_logits))).all()):
            raise self._mismatch(result, f"{brought} of requests {indices.tolist()}")
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
        indices: [num_reqs], the present index of each request among the running requests; -1 if the
            request was removed.
        is_quiet: if true, no request can reach its maximum length or fill a block in this step.
        cleaned: the blocks that workers set to zero before this step.
        kept: the checkpoints that this step writes. For each checkpoint: the index of its request
            among the step's records, and the hash of the last block before the checkpoint.
    """

    step: RankStep
    indices: Indices
    is_quiet: bool
    cleaned: Sequence[int] = ()
    kept: Sequence[tuple[int, BlockHash]] = ()

    @property
    def places(self) -> Places:
        """``indices`` as an array [num_reqs], even if it is a slice."""
        at = self.indices
        return np.arange(self.step.num_reqs) if isinstance(at, slice) else at

    def move(self, moves: Places) -> None:
        """Update ``indices`` after some running requests were removed.

        Args:
            moves: for each earlier index of a running request, its new index; -1 if the request was
                removed (``RunningRows.remove``).
        """
        places = self.places
        self.indices = np.where(places < 0, -1, moves[places])


def largest_of(steps: Sequence[RankStep]) -> StepShape:
    """Return a shape in which each number is the maximum of this number over all steps.

    The query length is 0 if the steps have different query lengths.
    """
    shapes = {step.shape for step in steps}
    if len(shapes) == 1:
        return shapes.pop()
    num_tokens, num_reqs, query_lens, num_samples = zip(*shapes, strict=True)
    query_len = query_lens[0] if len(set(query_lens)) == 1 else 0
    return StepShape(max(num_tokens), max(num_reqs), query_len, max(num_samples))


def longest_of(steps: Sequence[RankStep]) -> int:
    """Return the largest number of tokens that were computed for one request before these steps."""
    return max(int(step.records[:, 1].max()) for step in steps)
