"""Scheduler: who runs next. One decision per step, for every rank of a lockstep group.

There are no phases: each request's ``num_computed_tokens`` catches up with its tokens, whether
they are a prompt in chunks, the one token sampled last, or a history after preemption.
"""

from __future__ import annotations

from collections import deque

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.errors import (
    InvalidParameterError,
    QueueFullError,
    RequestTooLongError,
    WorkerError,
)
from dist_aclgraph.graph.dispatcher import GraphDispatcher
from dist_aclgraph.kv.block_pool import BlockPool, hash_block
from dist_aclgraph.scheduler.batch import BatchDraft, DecodeBatch
from dist_aclgraph.scheduler.request import FinishReason, Request, RequestOutput
from dist_aclgraph.scheduler.step import RankBatch, RowLogprobs, StepPlan, StepResult, unpack_ints


class Scheduler:
    """Owns requests, rows and the block pool. Knows nothing about devices, channels or time.

    One step is in flight at a time: ``schedule()``, then ``update()`` with its result.
    Running requests are ordered by arrival, and every waiting one arrived after all of them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        dispatcher: GraphDispatcher,
        *,
        max_model_len: int,
        epoch: int = 0,
    ) -> None:
        self.config = config
        self.pool = pool
        self.dispatcher = dispatcher
        self.max_model_len = max_model_len
        self.epoch = epoch
        self.step = 0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: BatchDraft | None = None
        self._aborted: list[Request] = []  # left while a step was in flight, still own blocks
        self._steady: DecodeBatch | None = None  # set while the decode batch goes on unchanged
        self._full_rows: list[Request] = []  # of the last step, whose last block is full
        self._last_tokens = b""  # int32, what the last step sampled
        self._stuck: tuple[Request, int] | None = None  # waits for more than so many free blocks
        self.num_preemptions = 0
        self.num_admitted_tokens = 0  # tokens of admitted requests, and
        self.num_cached_tokens = 0  # those of them found in the prefix cache

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight or could be scheduled."""
        return bool(self.running or self.waiting or self._in_flight is not None)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Put a request at the end of the waiting ones.

        Raises:
            RequestTooLongError: it can never fit into the model's context or the KV cache.
            QueueFullError: too many requests are waiting.
            InvalidParameterError: its id is in use.
        """
        if request.request_id in self._requests:
            raise InvalidParameterError(f"request id {request.request_id!r} is already in use")
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, the limit is scheduler.max_waiting"
            )
        request.max_total_tokens = self._max_total_tokens(request)
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """End a request at once, even while a step runs it; None where it is unknown or over.

        What the step in flight brings for it is dropped; blocks are freed after that step.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish_reason = reason
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._steady = None
            if self._in_flight is None:
                self._release(request)
            else:
                self._aborted.append(request)
        return _last_output(request)

    def abort_all(self, reason: FinishReason = "error") -> list[RequestOutput]:
        """End every request, e.g. because the group cannot be rebuilt."""
        outputs = [self.abort(request_id, reason) for request_id in list(self._requests)]
        return [output for output in outputs if output is not None]

    def restart(self, epoch: int, dispatcher: GraphDispatcher | None = None) -> None:
        """Begin a new epoch after workers were lost: their KV is gone, requests start again.

        Every request keeps its tokens; running ones come first, in the order of their arrival.
        """
        self.epoch = epoch
        self.dispatcher = dispatcher or self.dispatcher
        self._in_flight = None
        self._steady = None
        self._stuck = None
        self._aborted.clear()
        for request in reversed(self.running):
            request.leave_row()
            self.waiting.appendleft(request)
        self.running.clear()
        self.pool.clear()
        self._free_rows = list(range(self.config.max_num_seqs - 1, -1, -1))

    def schedule(self) -> StepPlan | None:
        """Decide the next step, or return None where no request can run.

        The step before must have been updated.
        """
        assert self._in_flight is None, "a step is in flight; update() comes first"
        if self._steady is not None and self._can_go_on():
            return self._go_on(self._steady)
        draft = BatchDraft()
        if self._schedule_running(draft):
            self._admit_waiting(draft)
        if not draft.requests:
            return None
        goes_on = draft.is_decode and len(draft.requests) == len(self.running)
        self._steady = draft.to_decode_batch() if goes_on else None
        return self._plan(draft, draft.build(), draft.query_len)

    def update(self, result: StepResult) -> list[RequestOutput]:
        """Take in a step's tokens; return what is new, one output per request that sampled.

        A result of another epoch or step is stale and changes nothing.

        Raises:
            WorkerError: the step failed on a rank, or did not bring one token for each sample;
                the epoch is over, and ``restart()`` or ``abort_all()`` comes next.
        """
        draft = self._in_flight
        if draft is None or (result.epoch, result.step) != (self.epoch, self.step):
            return []
        if result.error:
            raise WorkerError(result.error, result.rank, "SERVING")
        token_ids: list[int] = unpack_ints(result.token_ids).tolist()
        num_samples = sum(draft.samples)
        if len(token_ids) != num_samples:
            raise WorkerError(
                f"step {self.step} brought {len(token_ids)} tokens, {num_samples} were sampled",
                result.rank,
                "SERVING",
            )
        self._in_flight = None
        self._last_tokens = result.token_ids
        outputs = self._advance(draft, token_ids, result.logprobs)
        for request in self._aborted:
            self._release(request)
        self._aborted.clear()
        return outputs

    def stats(self) -> dict[str, int]:
        """Return gauges and counters for metrics."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "blocks_used": self.pool.num_used,
            "blocks_usable": self.pool.num_usable,
            "preemptions": self.num_preemptions,
            "admitted_tokens": self.num_admitted_tokens,
            "cached_tokens": self.num_cached_tokens,
        }

    def _can_go_on(self) -> bool:
        """Whether nobody can join the steady batch, and every row in it can get its block."""
        return (not self.waiting or not self._free_rows or self._is_stuck()) and len(
            self._full_rows
        ) <= self.pool.num_free

    def _go_on(self, steady: DecodeBatch) -> StepPlan:
        blocks: list[int] = []
        for request in self._full_rows:
            (block_id,) = self.pool.allocate(1)
            blocks += (request.row, len(request.block_ids), block_id)
            request.block_ids.append(block_id)
        return self._plan(steady.draft, steady.advance(self._last_tokens, blocks), 1)

    def _plan(self, draft: BatchDraft, batch: RankBatch, query_len: int) -> StepPlan:
        self._in_flight = draft
        self._full_rows.clear()
        self.step += 1
        graph, _ = self.dispatcher.dispatch(draft.num_tokens, len(draft.requests), query_len)
        return StepPlan(self.epoch, self.step, self.dispatcher.plan.version, graph, (batch,))

    def _schedule_running(self, draft: BatchDraft) -> bool:
        """Give every running request its next tokens; return False where one was preempted."""
        budget = self.config.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self.running) and draft.num_tokens < budget:
            request = self.running[index]
            computed = request.num_computed_tokens
            length = min(len(request.tokens) - computed, budget - draft.num_tokens)
            if not self._make_room(draft, request, computed + length):
                break
            draft.schedule(request, length)
            index += 1
        return num_preemptions == self.num_preemptions

    def _make_room(self, draft: BatchDraft, request: Request, num_tokens: int) -> bool:
        """Give a request blocks for ``num_tokens``, at the cost of whoever arrived last.

        Returns False where that was the request itself. A victim is never part of the draft, as
        requests are scheduled in the order of their arrival.
        """
        while (missing := self._blocks_for(num_tokens) - len(request.block_ids)) > 0:
            if missing <= self.pool.num_free:
                for block_id in self.pool.allocate(missing):
                    draft.add_block(request, block_id)
                break
            victim = self.running.pop()
            self._release(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        return True

    def _admit_waiting(self, draft: BatchDraft) -> None:
        budget = self.config.max_num_batched_tokens
        while self.waiting and self._free_rows and draft.num_tokens < budget:
            request = self.waiting[0]
            if self._is_stuck() or not self._take_blocks(request):
                return
            self.waiting.popleft()
            self.running.append(request)
            draft.started.append(request.start(self._free_rows.pop()))
            length = len(request.tokens) - request.num_computed_tokens
            draft.schedule(request, min(length, budget - draft.num_tokens))

    def _take_blocks(self, request: Request) -> bool:
        """Give a waiting request cached blocks of its beginning and new ones for the rest.

        At least one token stays to be computed: its logits choose the next one. All blocks of the
        known tokens are taken at once, so that no prompt is preempted half-way.
        """
        num_tokens = len(request.tokens)
        shared: list[int] = []
        if self.pool.prefix_cache:
            num_hashes = (num_tokens - 1) // self.pool.block_size
            self._hash_blocks(request, num_hashes)
            shared = self.pool.match(request.hashes[:num_hashes])
        missing = self._blocks_for(num_tokens) - len(shared)
        if missing > self.pool.num_free_without(shared):
            self._stuck = (request, self.pool.num_free)
            return False
        self.pool.share(shared)
        request.block_ids = shared + self.pool.allocate(missing)
        request.num_stored_blocks = len(shared)
        cached = request.num_computed_tokens = len(shared) * self.pool.block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(cached, request.num_prompt_tokens)
        self.num_admitted_tokens += num_tokens
        self.num_cached_tokens += cached
        return True

    def _is_stuck(self) -> bool:
        """Whether the first waiting request lacked blocks, and none were freed since."""
        if self._stuck is None:
            return False
        request, num_free = self._stuck
        return self.waiting[0] is request and self.pool.num_free <= num_free

    def _advance(
        self, draft: BatchDraft, token_ids: list[int], logprobs: tuple[RowLogprobs | None, ...]
    ) -> list[RequestOutput]:
        block_size = self.pool.block_size
        outputs: list[RequestOutput] = []
        finished: list[Request] = []
        position = -1
        for request, length, sample in zip(
            draft.requests, draft.lengths, draft.samples, strict=True
        ):
            position += sample
            if request.finish_reason is not None:
                continue  # aborted while the step was in flight
            request.num_computed_tokens = computed = request.num_computed_tokens + length
            if computed >= (request.num_stored_blocks + 1) * block_size:
                self._store_full_blocks(request)
                if computed == len(request.block_ids) * block_size:
                    self._full_rows.append(request)
            if not sample:
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
        if finished:
            self._finish(finished)
        return outputs

    def _finish(self, finished: list[Request]) -> None:
        self._steady = None
        self.running = [request for request in self.running if request.finish_reason is None]
        for request in finished:
            del self._requests[request.request_id]
            self._release(request)

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

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        self._free_rows.append(request.row)
        request.leave_row()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _max_total_tokens(self, request: Request) -> int:
        """Return the prompt plus output at which the request ends.

        The KV of the last token is never needed, so the cache may be one token too small for it.
        Without ``max_tokens`` a request makes do with the cache there is.
        """
        cache = self.pool.num_usable * self.pool.block_size + 1
        max_tokens = request.max_tokens
        limit = self.max_model_len
        if max_tokens is None:
            limit = min(limit, cache)
        else:
            limit = min(limit, request.num_prompt_tokens + max_tokens)
        num_tokens = len(request.tokens)
        if num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {num_tokens} tokens; the model's context is "
                f"{self.max_model_len}, and one of it is needed for output",
                "prompt",
            )
        if limit > cache or num_tokens >= limit:
            raise RequestTooLongError(
                f"{num_tokens} tokens that grow to {max(limit, num_tokens + 1)} cannot fit: the KV "
                f"cache holds {cache - 1}; ask for fewer tokens, or raise kv.num_blocks",
                "max_tokens",
            )
        return limit


def _last_output(request: Request) -> RequestOutput:
    return RequestOutput(
        request.request_id, (), request.finish_reason, (), max(0, request.num_cached_tokens)
    )
