"""RankScheduler: the running requests of one data-parallel rank, and what they run next.

There are no phases: each request's ``num_computed_tokens`` catches up with its tokens, whether
they are a prompt in chunks, the ones sampled last, or a history after preemption.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool, hash_block
from dist_aclgraph.scheduler.batch import NO_INTS, BatchDraft, DecodeBatch, NewTokens
from dist_aclgraph.scheduler.request import Request, RequestOutput
from dist_aclgraph.steps.step import RankBatch

IDLE = RankBatch(NO_INTS)


class RankScheduler:
    """Owns the rows and the block pool of one data-parallel rank. Which requests it gets is the
    group's decision.

    A step: ``go_on`` or ``draft``, then ``admit``, then ``build``; and ``advance`` with its result.
    Running requests are ordered by arrival.

    Args:
        index: which of the group's data-parallel ranks this is.
        num_drafts: draft tokens that workers have for each request that has sampled.
    """

    def __init__(
        self, index: int, config: SchedulerConfig, pool: BlockPool, num_drafts: int = 0
    ) -> None:
        self.index = index
        self.pool = pool
        self.running: list[Request] = []
        self._max_tokens = config.max_num_batched_tokens
        self._num_drafts = num_drafts
        self._decode_len = num_drafts + 1
        self._num_rows = config.max_num_seqs
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._draft: BatchDraft | None = None  # of the step that is decided, or in flight
        self._batch: RankBatch | None = None  # of a step that goes on from the last
        self._is_open = False  # whether the step that is decided may start requests here
        self._aborted: list[Request] = []  # left while a step was in flight, still own blocks
        self._steady: DecodeBatch | None = None  # set while the decode batch goes on unchanged
        self._full_rows: list[Request] = []  # of the last step, whose next step needs a block
        self._last: NewTokens  # what the last step brought
        self._refused: tuple[Request, int] | None = None  # needs more than so many free blocks
        self.num_preemptions = 0
        self.num_verified = 0  # times that a request's drafts were verified and might have passed
        self._accepted = np.zeros(self._decode_len, np.int64)  # times that so many were accepted

    @property
    def accepted_by_position(self) -> list[int]:
        """How often the first, the second, ... draft token of a request was accepted."""
        at_least: list[int] = self._accepted[::-1].cumsum()[::-1].tolist()
        return at_least[1:]

    # ---- deciding a step

    def go_on(self) -> bool:
        """Let the steady decode batch run its next step; False where there is none, or a row of it
        cannot get its block.
        """
        steady = self._steady
        if steady is None or len(self._full_rows) > self.pool.num_free:
            return False
        blocks: list[int] = []
        for request in self._full_rows:
            (block_id,) = self.pool.allocate(1)
            blocks += (request.row, len(request.block_ids), block_id)
            request.block_ids.append(block_id)
        self._full_rows.clear()
        self._batch = steady.advance(self._last, blocks)
        self._draft = steady.draft
        self._is_open = False
        return True

    def draft(self) -> list[Request]:
        """Begin a step: give running requests their next tokens; return who was preempted."""
        draft = self._draft = BatchDraft(self._decode_len)
        self._batch = self._steady = None
        self._full_rows.clear()
        victims: list[Request] = []
        index = 0
        while index < len(self.running) and draft.num_tokens < self._max_tokens:
            request = self.running[index]
            length = len(request.tokens) - request.num_computed_tokens
            left = self._max_tokens - draft.num_tokens
            if request.has_drafts:
                length += self._num_drafts
                if length > left:
                    break  # drafts are verified all at once
            length = min(length, left)
            if not self._make_room(draft, request, length, victims):
                break
            draft.schedule(request, length)
            index += 1
        self._is_open = not victims
        self.num_preemptions += len(victims)
        return victims

    def may_admit(self, request: Request) -> bool:
        """Whether a row is free, and nothing says that blocks are not."""
        if not self._free_rows:
            return False
        return (
            self._refused is None
            or self._refused[0] is not request
            or self.pool.num_free > self._refused[1]
        )

    def has_room_for(self, request: Request) -> bool:
        """Whether the step that is decided may start the request, if there are blocks."""
        draft = self._draft
        return (
            self._is_open
            and draft is not None
            and draft.num_tokens < self._max_tokens
            and self.may_admit(request)
        )

    def match(self, request: Request) -> list[int]:
        """Return the cached blocks of a waiting request's beginning.

        At least one token stays to be computed: its logits choose the next one.
        """
        if not self.pool.prefix_cache:
            return []
        count = (len(request.tokens) - 1) // self.pool.block_size
        self._hash_blocks(request, count)
        return self.pool.match(request.hashes[:count])

    def admit(self, request: Request, shared: Sequence[int]) -> bool:
        """Start a waiting request with the cached blocks that ``match`` found.

        All blocks of the known tokens are taken at once, so that no prompt is preempted half-way.
        Returns False where they are not free.
        """
        assert self._draft is not None
        num_tokens = len(request.tokens)
        missing = self._blocks_for(num_tokens) - len(shared)
        if missing > self.pool.num_free_without(shared):
            self._refused = (request, self.pool.num_free)
            return False
        self.pool.share(shared)
        request.block_ids = [*shared, *self.pool.allocate(missing)]
        request.num_stored_blocks = len(shared)
        cached = request.num_computed_tokens = len(shared) * self.pool.block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
        if self.running and self.running[-1].arrival > request.arrival:
            insort(self.running, request, key=lambda other: other.arrival)
        else:
            self.running.append(request)
        draft = self._draft
        draft.started.append(request.start(self.index, self._free_rows.pop()))
        draft.schedule(request, min(num_tokens - cached, self._max_tokens - draft.num_tokens))
        return True

    def build(self) -> RankBatch:
        """Return what was decided, an empty batch where nothing runs."""
        if self._batch is not None:
            return self._batch
        draft = self._draft
        assert draft is not None
        if not draft.requests:
            return IDLE
        if draft.is_decode and len(draft.requests) == len(self.running):
            self._steady = draft.to_decode_batch()
        return draft.build()

    def drop(self) -> None:
        """Take back the beginning of a step, as no rank can run one."""
        self._draft = None

    @property
    def in_flight(self) -> BatchDraft:
        assert self._draft is not None
        return self._draft

    # ---- after a step

    def advance(self, new: NewTokens) -> tuple[list[RequestOutput], list[Request]]:
        """Take in what a step brought; return what is new, and which requests are over."""
        draft = self.in_flight
        self._draft = None
        self._last = new
        finished: list[Request] = []
        if new.counts is None:
            outputs = self._advance_by_one(draft, new, finished)
        else:
            outputs = self._advance_by_counts(draft, new, finished)
        if finished:
            self._steady = None
            self.running = [request for request in self.running if request.finish_reason is None]
        if finished or self._aborted:
            for request in (*finished, *self._aborted):
                self._release(request)
            self._aborted.clear()
        return outputs, finished

    def _advance_by_one(
        self, draft: BatchDraft, new: NewTokens, finished: list[Request]
    ) -> list[RequestOutput]:
        block_size = self.pool.block_size
        _, token_ids, _, logprobs = new
        outputs: list[RequestOutput] = []
        position = -1
        for request, length, samples in zip(
            draft.requests, draft.lengths, draft.num_logits, strict=True
        ):
            position += samples
            if request.finish_reason is not None:
                continue  # aborted while the step was in flight
            request.num_computed_tokens = computed = request.num_computed_tokens + length
            if computed >= (request.num_stored_blocks + 1) * block_size:
                self._store_full_blocks(request)
                if computed == len(request.block_ids) * block_size:
                    self._full_rows.append(request)
            if not samples:
                continue
            token_id = token_ids[position]
            tokens = request.tokens
            tokens.append(token_id)
            reason = None
            if token_id in request.stop_ids or len(tokens) >= request.max_total_tokens:
                reason = request.finish_reason = request.finish_reason_after(token_id)
                if reason is not None:
                    finished.append(request)
            outputs.append(
                RequestOutput(
                    request.request_id,
                    (token_id,),
                    reason,
                    (logprobs[position],) if logprobs else (),
                    request.num_cached_tokens,
                )
            )
        return outputs

    def _advance_by_counts(
        self, draft: BatchDraft, new: NewTokens, finished: list[Request]
    ) -> list[RequestOutput]:
        """Take in one token and the accepted drafts of each request."""
        block_size, decode_len = self.pool.block_size, self._decode_len
        _, token_ids, counts, logprobs = new
        assert counts is not None
        self.num_verified += draft.num_verified
        self._accepted += np.bincount(counts - 1, minlength=decode_len)
        outputs: list[RequestOutput] = []
        ends = iter(counts.cumsum().tolist())
        end = 0
        for request, length, samples in zip(
            draft.requests, draft.lengths, draft.num_logits, strict=True
        ):
            start = end
            if samples:
                end = next(ends)
            if request.finish_reason is not None:
                continue  # aborted while the step was in flight
            count = end - start
            tokens = request.tokens
            brought = token_ids[start:end]
            if len(tokens) + count >= request.max_total_tokens or not request.stop_ids.isdisjoint(
                brought
            ):
                count = request.append(brought)
                del brought[count:]
                if request.finish_reason is not None:
                    finished.append(request)
            else:
                tokens += brought
            # What was computed for drafts that were rejected is written again.
            computed = request.num_computed_tokens + length - samples + count
            request.num_computed_tokens = computed
            if computed >= (request.num_stored_blocks + 1) * block_size:
                self._store_full_blocks(request)
            covered = len(request.block_ids) * block_size
            if min(computed + decode_len, request.max_total_tokens - 1) > covered:
                self._full_rows.append(request)
            if samples:
                request.num_new_tokens = count
                outputs.append(
                    RequestOutput(
                        request.request_id,
                        tuple(brought),
                        request.finish_reason,
                        logprobs[start : start + count] if logprobs else (),
                        request.num_cached_tokens,
                    )
                )
        return outputs

    # ---- requests that leave

    def abort(self, request: Request) -> None:
        """Let a running request go; its blocks are free when no step writes to them."""
        self.running.remove(request)
        self._steady = None
        if self._draft is None:
            self._release(request)
        else:
            self._aborted.append(request)

    def clear(self) -> list[Request]:
        """Forget rows and blocks, which the workers have lost; return who ran."""
        requests = self.running
        for request in requests:
            request.leave_row()
        self.running = []
        self._aborted.clear()
        self._draft = self._steady = self._refused = None
        self.pool.clear()
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        return requests

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        self._free_rows.append(request.row)
        request.leave_row()

    # ---- blocks

    def _make_room(
        self, draft: BatchDraft, request: Request, length: int, victims: list[Request]
    ) -> bool:
        """Give a request blocks for its next tokens, at the cost of whoever arrived last.

        Drafts beyond the last token that it can have get no block. Returns False where the victim
        was the request itself. A victim is never part of the draft, as requests are scheduled in
        the order of their arrival.
        """
        num_tokens = min(request.num_computed_tokens + length, request.max_total_tokens - 1)
        while (missing := self._blocks_for(num_tokens) - len(request.block_ids)) > 0:
            if missing <= self.pool.num_free:
                for block_id in self.pool.allocate(missing):
                    draft.add_block(request, block_id)
                break
            victim = self.running.pop()
            self._release(victim)
            victims.append(victim)
            if victim is request:
                return False
        return True

    def _store_full_blocks(self, request: Request) -> None:
        num_full = request.num_computed_tokens // self.pool.block_size
        if self.pool.prefix_cache:
            self._hash_blocks(request, num_full)
            for index in range(request.num_stored_blocks, num_full):
                self.pool.store(request.block_ids[index], request.hashes[index])
        request.num_stored_blocks = num_full

    def _hash_blocks(self, request: Request, count: int) -> None:
        """Extend the request's hashes to ``count`` full blocks; each is computed once."""
        size = self.pool.block_size
        hashes = request.hashes
        while len(hashes) < count:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, request.tokens[start : start + size]))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)
