"""What one data-parallel rank runs in a step, collected row by row, or carried on from the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dist_aclgraph.errors import WorkerError
from dist_aclgraph.ints import IntArray, pack_ints, unpack_ints
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.step import RankBatch, RowLogprobs, RowStart, StepResult

NO_INTS = b""


class NewTokens(NamedTuple):
    """What a step brought for one batch.

    Attributes:
        tokens: [num_new], request by request; ``token_ids`` are the same.
        counts: [num_samples], tokens of each request that samples; None is one each.
        logprobs: [num_new], or empty.
    """

    tokens: IntArray
    token_ids: list[int]
    counts: IntArray | None
    logprobs: tuple[RowLogprobs | None, ...]


class BatchDraft:
    """Collects what the ranks of one data-parallel rank run in a step.

    ``requests``, ``lengths`` (tokens that each runs) and ``num_logits`` (positions of each that are
    sampled after) are in batch order.

    Args:
        decode_len: tokens of a request that decodes: its last one, and its drafts.
    """

    def __init__(self, decode_len: int) -> None:
        self.requests: list[Request] = []
        self.lengths: list[int] = []
        self.num_logits: list[int] = []
        self.num_tokens = 0
        self.num_samples = 0  # requests with logits
        self.num_positions = 0  # logits of all
        self.num_verified = 0  # requests whose drafts may pass
        self.started: list[RowStart] = []
        self._decode_len = decode_len
        self._records: list[int] = []
        self._appended: list[int] = []
        self._blocks: list[int] = []

    def schedule(self, request: Request, length: int) -> None:
        """Add the next ``length`` tokens of a request that has a row and enough blocks.

        Those beyond the tokens that are known are its drafts.
        """
        computed, known = request.num_computed_tokens, len(request.tokens)
        end = computed + length
        num_logits = max(0, end - known + 1)
        # Workers know what the row started with, and what it got before its last step.
        for token_id in request.tokens[max(known - request.num_new_tokens, request.num_started) :]:
            self._appended += (request.row, token_id)
        self._records += (request.row, computed, length, num_logits)
        self.num_logits.append(num_logits)
        self.requests.append(request)
        self.lengths.append(length)
        self.num_tokens += length
        self.num_positions += num_logits
        self.num_samples += num_logits > 0
        self.num_verified += num_logits > 1 and not request.sampling.has_penalties

    def add_block(self, request: Request, block_id: int) -> None:
        """Extend a row's block table by one, at its end."""
        self._blocks += (request.row, len(request.block_ids), block_id)
        request.block_ids.append(block_id)

    @property
    def is_decode(self) -> bool:
        """Whether every request runs one token and its drafts, and samples after each."""
        return self.num_tokens == self.num_positions == len(self.requests) * self._decode_len

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, requests and uniform query length of a batch that is complete.

        The query length is 0 where lengths differ, or look like decoding and are not.
        """
        query_len = length = self.lengths[0]
        if self.is_decode:
            query_len = self._decode_len
        elif length in (1, self._decode_len) or any(other != length for other in self.lengths):
            query_len = 0
        return self.num_tokens, len(self.requests), query_len

    def build(self) -> RankBatch:
        return RankBatch(
            scheduled=pack_ints(self._records),
            appended=pack_ints(self._appended),
            blocks=pack_ints(self._blocks),
            started=tuple(self.started),
        )

    def to_decode_batch(self) -> DecodeBatch:
        records = np.array(self._records, dtype="<i4").reshape(-1, 4)
        return DecodeBatch(self, records)

    def read(self, result: StepResult) -> NewTokens:
        """Return what the rank that owns this batch's output has sampled.

        Raises:
            WorkerError: it is not what was asked for.
        """
        tokens = unpack_ints(result.token_ids)
        token_ids: list[int] = tokens.tolist()
        if self.num_positions == self.num_samples and not result.counts:
            if len(token_ids) != self.num_samples:
                raise self._mismatch(result, f"{len(token_ids)} tokens")
            return NewTokens(tokens, token_ids, None, result.logprobs)
        counts = unpack_ints(result.counts)
        if not (
            len(counts) == self.num_samples
            and int(counts.sum()) == len(token_ids)
            and bool(((counts >= 1) & (counts <= self._limits)).all())
        ):
            raise self._mismatch(result, f"{len(token_ids)} tokens in counts {counts.tolist()}")
        return NewTokens(tokens, token_ids, counts, result.logprobs)

    @cached_property
    def _limits(self) -> IntArray:
        """[num_samples], the most tokens that each request can get."""
        return np.array([count for count in self.num_logits if count], dtype=np.int32)

    def _mismatch(self, result: StepResult, brought: str) -> WorkerError:
        return WorkerError(
            f"step {result.step} brought {brought}, {self.num_samples} requests were sampled at "
            f"{self.num_positions} positions",
            result.rank,
            "SERVING",
        )


def largest_of(drafts: Sequence[BatchDraft]) -> tuple[int, int, int]:
    """Return tokens, requests and uniform query length of a graph that holds each of the batches.

    The query length is 0 where they do not all have the same.
    """
    if len(drafts) == 1:
        return drafts[0].shape
    num_tokens, num_reqs, query_lens = zip(*[draft.shape for draft in drafts], strict=True)
    query_len = query_lens[0] if len(set(query_lens)) == 1 else 0
    return max(num_tokens), max(num_reqs), query_len


class DecodeBatch:
    """A decode batch that goes on unchanged: its arrays persist, a step only advances them."""

    def __init__(self, draft: BatchDraft, records: IntArray) -> None:
        self.draft = draft
        num_reqs = len(draft.requests)
        self._records = records  # [num_reqs, 4]
        self._rows = records[:, 0]
        self._computed = records[:, 1]
        self._appended = np.empty((num_reqs, 2), dtype="<i4")
        self._appended[:, 0] = self._rows
        self._tokens = self._appended[:, 1]

    def advance(self, new: NewTokens, blocks: Sequence[int]) -> RankBatch:
        """Return the next step's batch.

        Args:
            new: what the last step brought.
            blocks: flat records (row, index, block id) of rows that need one block more.
        """
        if new.counts is None:
            self._computed += 1
            self._tokens[:] = new.tokens
            appended = self._appended.tobytes()
        else:
            self._computed += new.counts
            rows = np.repeat(self._rows, new.counts)
            appended = np.column_stack((rows, new.tokens)).tobytes()
        return RankBatch(
            self._records.tobytes(), appended, pack_ints(list(blocks)) if blocks else NO_INTS
        )
