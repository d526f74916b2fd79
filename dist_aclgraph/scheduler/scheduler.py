"""Scheduler: decides for each step which requests run on the ranks of a lockstep group.

Requests wait in one queue, in the order of their deadlines. When a request is admitted, it is
assigned to one data-parallel rank. All ranks run the same steps, even ranks without work. All ranks
replay the same graph, which is large enough for the largest batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.errors import (
    DistAclGraphError,
    GrammarError,
    InvalidParameterError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestTooLongError,
    WorkerError,
)
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import LookUps
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.scheduler.decode_blocks import Lack
from dist_aclgraph.scheduler.decoding_ranks import land_decoding
from dist_aclgraph.scheduler.group_copies import GroupCopies
from dist_aclgraph.scheduler.group_rows import GroupRows
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.rank import RankScheduler
from dist_aclgraph.scheduler.rank_step import (
    NewTokens,
    RankStep,
    StepBuilder,
    StepKind,
    largest_of,
    longest_of,
)
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.waiting_requests import WaitingRequests
from dist_aclgraph.steps.delta import FinishReason, RequestDelta
from dist_aclgraph.steps.step import StepPlan, StepResult, StepSize
from dist_aclgraph.topology import MAY_LOSE_TOKENS, ChooseExchange, no_exchange

MAX_IN_FLIGHT = 2
NON_FINITE = (
    "the model computed NaN or infinity for this request, twice: its weights may be damaged, or "
    "too large for the dtype (bfloat16 holds numbers that are infinite in float16)"
)
NOTHING = StepOutputs()
NO_TOKENS = NewTokens(NOTHING.token_ids, None, ())


class _Decided(NamedTuple):
    """A step in flight: its plan, and the work of each data-parallel rank."""

    plan: StepPlan
    steps: Sequence[RankStep]


class Scheduler:
    """Owns the requests of a lockstep group, and decides the steps of its data-parallel ranks. The
    scheduler knows nothing about devices, channels or time.

    ``schedule()`` decides a step, and ``update()`` applies the step's results. The next step may be
    decided before ``update()``. So the scheduler may notice the end of a request one step late. The
    request has then run in one step too many, and its result from this step is dropped. At most two
    steps are in flight, because workers keep only the tokens of the last step.

    Args:
        pools: one block pool for each data-parallel rank, all of the same size.
        num_drafts: number of drafts that workers make for each sampled request.
        tp, pcp: number of ranks of a TP group, and of a PCP group. Each data-parallel rank has tp *
            pcp workers; the first worker owns the rank's output.
        choose_exchange: returns the kind of exchange that sends a step's tokens to their experts.
        exact: if true, other requests do not change the shape of the step that computes a token. A
            step then contains either a chunk of one prompt on each rank, or only requests whose
            prompts are computed. Output that another engine has sampled is computed token by token.
        look_ups: looks up the files of KV blocks; None if no copies are kept.
        files: the files that each node has; None if all workers are on the engine's node.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: Sequence[BlockPool],
        dispatcher: GraphDispatcher,
        *,
        max_model_len: int,
        epoch: int = 0,
        num_drafts: int = 0,
        tp: int = 1,
        pcp: int = 1,
        choose_exchange: ChooseExchange = no_exchange,
        exact: bool = False,
        look_ups: LookUps | None = None,
        files: GroupFiles | None = None,
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.max_model_len = max_model_len
        self.num_drafts = num_drafts
        self.epoch = epoch
        self.step = 0
        window = pools[0].block_size + num_drafts + 1
        self._rows = GroupRows(len(pools), config.max_num_seqs, window, num_drafts)
        self._ranks_per_batch = tp * pcp
        self.waiting = WaitingRequests()
        self.copies = GroupCopies(pools, look_ups, tp * pcp, self.waiting, files)
        self.ranks = [
            RankScheduler(
                index,
                config,
                pool,
                self._rows.of_rank(index),
                num_drafts,
                pcp,
                exact=exact,
                copies=copies,
            )
            for index, (pool, copies) in enumerate(zip_longest(pools, self.copies.ranks))
        ]
        # Kinds of steps, in the order in which they are tried; the first kind with work is chosen.
        self._kinds: tuple[StepKind, ...] = ("prompt", "decode") if exact else ("mixed",)
        self._splits_prompts = pcp > 1
        self._choose_exchange = choose_exchange
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._in_flight: deque[_Decided] = deque()  # oldest first
        self._is_void = False  # whether the step in flight has invalid results and must run again
        self.num_reruns = 0
        self.num_non_finite = 0  # number of requests that ended because of NaN or infinite logits
        self.admitted: list[Request] = []  # requests that the last decision started
        self.num_admitted_tokens = 0
        # number of prompt tokens that were found in the prefix cache when requests were admitted
        self.num_cached_tokens = 0
        # For each rank, the number of tokens that its experts have computed.
        self.expert_tokens: dict[int, int] = {}

    @property
    def running(self) -> list[Request]:
        return [request for rank in self.ranks for request in rank.running]

    @property
    def owners(self) -> range:
        """The first worker of each data-parallel rank."""
        return range(0, len(self.ranks) * self._ranks_per_batch, self._ranks_per_batch)

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight or could be scheduled."""
        return bool(self._in_flight or self.waiting or any(len(rank.rows) for rank in self.ranks))

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self.ranks)

    def add(self, request: Request) -> None:
        """Add a request to the queue, in the order of deadlines.

        A request that another group has begun is never refused because of the queue's length.

        Raises:
            RequestTooLongError: the request is too long for the model's context or the KV cache.
            QueueFullError: too many requests are waiting.
            InvalidParameterError: another request has the same id, or the request wants
                log-probabilities of a prompt that several ranks split.
        """
        if request.sampling.prompt_logprobs >= 0 and self._splits_prompts:
            raise InvalidParameterError(
                "prompt_logprobs are not offered with parallel.pcp above 1; ask a service with "
                "pcp 1",
                "prompt_logprobs",
            )
        if request.request_id in self._requests:
            raise InvalidParameterError(f"request id {request.request_id!r} is already in use")
        # Requests that will get a row in the next step do not count as waiting requests.
        num_waiting = len(self.waiting) - sum(rank.num_free_rows for rank in self.ranks)
        if num_waiting >= self.config.max_waiting and not request.has_output:
            raise QueueFullError(
                f"{num_waiting} requests are waiting, the limit is scheduler.max_waiting"
            )
        request.max_total_tokens = self._max_total_tokens(request)
        request.arrival = self._num_arrived
        request.deadline = self.step - (-len(request.tokens) // self.config.prompt_share)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self.waiting.add([request])

    def abort(self, request_id: str, reason: FinishReason = "abort") -> RequestDelta | None:
        """End a request immediately, even while a step runs the request.

        The request's results from steps in flight are dropped. Returns None if the request is
        unknown or has finished.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.is_over = True
        if request.row >= 0:
            self.ranks[request.dp_rank].abort(request)
        else:
            self.waiting.remove(request)
        return RequestDelta(
            request_id, finish_reason=reason, num_cached_tokens=max(0, request.num_cached_tokens)
        )

    def abort_all(self, reason: FinishReason = "error") -> list[RequestDelta]:
        """End every request, for example because the group cannot be started again."""
        outputs = [self.abort(request_id, reason) for request_id in list(self._requests)]
        return [output for output in outputs if output is not None]

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """Decide the next step.

        Returns None if no rank has a request that can run, or if the results of steps in flight are
        needed first.
        """
        self.admitted = []
        if self.waiting.has_fetching:
            self.waiting.end_looking()
        if self._is_void and (again := self._run_again()) is not None:
            return again
        assert len(self._in_flight) < MAX_IN_FLIGHT, "update() comes first"
        if self._in_flight and self._in_flight[-1].plan.exchange in MAY_LOSE_TOKENS:
            return None  # the step in flight may have to run again first
        lacks = [rank.lack() for rank in self.ranks]
        if any(lack and rank.must_wait(lack) for rank, lack in zip(self.ranks, lacks, strict=True)):
            return None
        for kind in self._kinds:
            builders = self._build(kind, lacks)
            if any(builder.has_work for builder in builders):
                # The next decision tries this kind last, so that no kind waits for ever.
                self._kinds = (*(k for k in self._kinds if k != kind), kind)
                return self._decide(builders)
        # Only the result of a step shows that a grammar is compiled. So if no other request can
        # run, requests whose grammars may not be compiled yet are tried in a step.
        if self._in_flight:
            return None
        num_held = sum(rank.free_held() for rank in self.ranks) + self.waiting.try_grammars()
        return self.schedule() if num_held else None

    def _build(self, kind: StepKind, lacks: Sequence[Lack | None]) -> list[StepBuilder]:
        """Begin a step of the kind ``kind`` on all ranks, and start all waiting requests that fit.

        Args:
            lacks: for each rank, the requests that have too few blocks for this step.
        """
        builders = []
        for rank, lack in zip(self.ranks, lacks, strict=True):
            builder, victims = rank.begin(lack, kind)
            builders.append(builder)
            self.waiting.add(victims)
        queue = self.waiting.queue
        while queue:
            first = queue[0]
            for builder in builders:
                builder.serve_chunks(before=first)
            if not self._admit(first, builders):
                break
            queue.popleft()
        for builder in builders:
            if builder.unserved:
                builder.serve_chunks()
        return builders

    def update(self, results: Sequence[StepResult]) -> StepOutputs:
        """Apply the results of all ranks for the oldest step in flight; return the outputs.

        Results of another epoch or step are ignored. If the exchange between experts had no
        capacity for a token, the results of the step are invalid. ``schedule()`` then issues the
        step again. NaN or infinite logits of a request might come from its KV blocks. So the
        request waits again, and is computed from its first token in clean blocks that no other
        request uses. If its logits are NaN or infinite a second time, the request ends. If a rank
        has not compiled the grammar of a request, the request gets no token. The request waits
        until all ranks have compiled the grammar.

        Raises:
            WorkerError: the step failed on a rank, or a result does not have the expected tokens.
                The epoch is over, and the caller must call ``abort_all()``.
        """
        if not self._in_flight or self._is_void:
            return NOTHING
        plan, steps = self._in_flight[0]
        current: dict[int, StepResult] = {}
        for result in results:
            if result.step == plan.step and result.epoch == self.epoch:
                if result.error:
                    raise WorkerError(result.error, result.rank, "SERVING")
                current[result.rank] = result
        if not current:
            return NOTHING
        if plan.exchange is not None and self._is_void_after(plan, current):
            return NOTHING
        # All results are checked before the first one is applied, because a failed step must
        # change nothing.
        brought = [
            step.read(self._output_of(rank, plan, current)) if step.num_reqs else NO_TOKENS
            for rank, step in zip(self.ranks, steps, strict=True)
        ]
        told = [result for result in current.values() if result.unmasked or result.compiling]
        if told or self.waiting.has_compiling or self._rows.held.any():
            self._hold(steps, told)
        self._in_flight.popleft()
        others, parts = land_decoding(self._rows, self.ranks, brought)
        failed: list[tuple[Request, DistAclGraphError]] = []
        for rank in others:
            new = brought[rank.index]
            if len(new.non_finite):
                failed += [
                    (request, NonFiniteLogitsError(NON_FINITE))
                    for request in self._try_again(rank.release_non_finite(new))
                ]
            for request, why in rank.release_failed(new) if new.failed else ():
                del self._requests[request.request_id]
                request.is_over = True
                failed.append((request, GrammarError(f"the grammar of the answer failed: {why}")))
            outputs, finished = rank.advance(new)
            parts.append(outputs)
            for request in finished:
                del self._requests[request.request_id]
        outputs = StepOutputs.joined(parts)
        return msgspec.structs.replace(outputs, failed=failed) if failed else outputs

    def _try_again(self, requests: Sequence[Request]) -> list[Request]:
        """Let a request wait again if its logits are NaN or infinite for the first time. End and
        return requests whose logits were NaN or infinite before.
        """
        failed = []
        for request in requests:
            if request.is_suspect:
                del self._requests[request.request_id]
                request.is_over = True
                failed.append(request)
            else:
                request.is_suspect = True
                self.waiting.add([request])
        self.num_non_finite += len(failed)
        return failed

    def rewind(self, epoch: int) -> None:
        """Undo the steps in flight, after the group has resumed in a new epoch with valid KV.

        After this call, ``schedule()`` decides steps for the same tokens, and sends all rows to
        workers again. If the model has recurrent state, requests wait again, and start from
        checkpoints. Without recurrent state, requests keep their computed tokens.
        """
        self.epoch = epoch
        self._in_flight.clear()
        self._is_void = False
        self.copies.forget()
        for rank in self.ranks:
            self.waiting.add(rank.rewind())

    def lose_kv(self) -> None:
        """Let every request wait and start again at its first token, because all KV is lost.

        No step may be in flight. No token is sent to a client twice.
        """
        assert not self._in_flight, "rewind() comes first"
        for rank in self.ranks:
            self.waiting.add(rank.lose_kv())

    def stats(self) -> dict[str, int]:
        """Return gauges and counters for metrics."""
        num_verified = sum(rank.num_verified for rank in self.ranks)
        return {
            "running": sum(rank.num_running for rank in self.ranks),
            "waiting": len(self.waiting),
            "blocks_used": sum(rank.pool.num_used for rank in self.ranks),
            "blocks_usable": sum(rank.pool.num_usable for rank in self.ranks),
            "preemptions": self.num_preemptions,
            "admitted_tokens": self.num_admitted_tokens,
            "cached_tokens": self.num_cached_tokens,
            "reruns": self.num_reruns,
            "non_finite": self.num_non_finite,
            "drafts": num_verified,
            "draft_tokens": num_verified * self.num_drafts,
            "accepted_tokens": sum(self.accepted_by_position),
        }

    @property
    def accepted_by_position(self) -> list[int]:
        """[num_drafts], element i says how often the draft with the index i was accepted."""
        counts = [rank.accepted_by_position for rank in self.ranks]
        return [sum(at_position) for at_position in zip(*counts, strict=True)]

    # ---- the decision

    def _admit(self, request: Request, builders: Sequence[StepBuilder]) -> bool:
        """Start the first waiting request on a rank; return False if no rank can start it.

        Criteria for the rank, in this order: longest cached prefix, fewest running requests, most
        free blocks. On several nodes, the rank that has looked up the request's files is preferred
        among ranks with equal prefixes. Requests that wait for files then count as running.
        """
        spans_nodes = self.copies.spans_nodes
        has_rank = spans_nodes and request.look_up is not None  # other nodes have other files
        offers = []
        for rank, builder in zip(self.ranks, builders, strict=True):
            if rank.has_room_for(builder, request):
                shared = rank.prefixes.match(request)
                busy = rank.num_running + spans_nodes * self.waiting.num_fetching[rank.index]
                is_other = has_rank and rank.index != request.dp_rank
                order = (-len(shared), is_other, busy, -rank.pool.num_free, rank.index)
                offers.append((order, shared))
        for (_, is_other, *_, index), shared in sorted(offers):
            # No look-up begins for a second rank, which could also be full after the look-up.
            if not is_other:
                request.dp_rank = index
                if self.ranks[index].prefixes.fetch(request, shared):
                    self.waiting.wait_for_files(request)
                    return True
            if self.ranks[index].start(builders[index], request, shared):
                request.look_up = None
                self.admitted.append(request)
                self.num_admitted_tokens += len(request.tokens)
                self.num_cached_tokens += len(shared) * self.ranks[index].pool.block_size
                return True
        return False

    def _decide(self, builders: Sequence[StepBuilder]) -> StepPlan:
        """Make the step's plan from the builders of all ranks."""
        built = [rank.build(builder) for rank, builder in zip(self.ranks, builders, strict=True)]
        steps, batches = zip(*built, strict=True)
        self._rows.take_off(
            [rank for rank, step in enumerate(steps) if isinstance(step.indices, slice)]
        )
        busy = [step for step in steps if step.num_reqs]
        num_tokens, num_reqs, query_len, num_samples = largest_of(busy)
        graph, _ = self.dispatcher.dispatch(
            num_tokens, num_reqs, query_len, partial(self._may_replay, steps)
        )
        kv_len = 0
        if graph is not None and graph.query_len:
            kv_len = longest_of(busy) + graph.query_len
        self.step += 1
        plan = StepPlan(
            self.epoch,
            self.step,
            self.dispatcher.plan.version,
            graph,
            batches,
            self._choose_exchange(num_tokens if graph is None else graph.num_tokens),
            StepSize(num_tokens, num_samples, kv_len),
        )
        self._in_flight.append(_Decided(plan, steps))
        return plan

    def _may_replay(self, steps: Sequence[RankStep], graph: BatchDescriptor) -> bool:
        """Whether the graph computes all needed results, and its padding fits in the cache."""
        return graph.mode != "FULL" or all(
            not step.needs_hidden and rank.has_room_for_padding(step, graph, self.max_model_len)
            for rank, step in zip(self.ranks, steps, strict=True)
        )

    # ---- steps whose results are invalid

    def _is_void_after(self, plan: StepPlan, results: dict[int, StepResult]) -> bool:
        """Store the token counts of experts; return whether an exchange exceeded its capacity."""
        for result in results.values():
            self.expert_tokens[result.rank] = result.expert_tokens
            if result.num_unplaced and plan.exchange not in MAY_LOSE_TOKENS:
                raise WorkerError(
                    f"{result.num_unplaced} tokens found no room in an exchange that has room for "
                    "all",
                    result.rank,
                    "SERVING",
                )
        self._is_void = any(result.num_unplaced for result in results.values())
        return self._is_void

    def _run_again(self) -> StepPlan | None:
        """Run the step in flight again, with an exchange whose capacity is enough for all tokens.

        The step writes the same KV again. Returns None if all requests of the step were removed.
        """
        self._is_void = False
        plan, _ = self._in_flight.pop()
        steps = [rank.leave_out() for rank in self.ranks]
        busy = [step for step in steps if step.num_reqs]
        if not busy:
            for rank in self.ranks:
                rank.advance(NO_TOKENS)
            return None
        largest = largest_of(busy)
        self.num_reruns += 1
        self.step += 1
        again = msgspec.structs.replace(
            plan,
            step=self.step,
            plan_version=self.dispatcher.plan.version,
            graph=None,
            batches=tuple(rank.again(step) for rank, step in zip(self.ranks, steps, strict=True)),
            exchange="all_gather",
            largest=StepSize(largest.num_tokens, largest.num_samples),
        )
        self._in_flight.append(_Decided(again, steps))
        return again

    def _output_of(
        self, rank: RankScheduler, plan: StepPlan, results: dict[int, StepResult]
    ) -> StepResult:
        """Return the result of the rank's first worker. Only this result contains tokens."""
        owner = rank.index * self._ranks_per_batch
        result = results.get(owner)
        if result is None:
            raise WorkerError(f"step {plan.step} brought no result", owner, "SERVING")
        return result

    def _hold(self, steps: Sequence[RankStep], told: Sequence[StepResult]) -> None:
        """Let requests wait while a worker of their data-parallel rank compiles their grammar.

        Args:
            told: the results that contain rows whose grammars are not compiled.
        """
        unmasked: list[set[int]] = [set() for _ in self.ranks]
        compiling: list[set[int]] = [set() for _ in self.ranks]
        for result in told:
            index = result.rank // self._ranks_per_batch
            unmasked[index].update(steps[index].read_unmasked(result).tolist())
            compiling[index].update(unpack_ints(result.compiling).tolist())
        for rank in self.ranks:
            victims = rank.hold(unmasked[rank.index], compiling[rank.index])
            self.waiting.wait_for_grammars(victims, rank.index)
        self.waiting.end_compiling(compiling)

    def _max_total_tokens(self, request: Request) -> int:
        """Return the maximum length of the request, counting prompt and output together.

        A request can be one token longer than the cache, because the last token needs no KV.
        Without ``max_tokens``, the size of the cache limits the request.
        """
        pool = self.ranks[0].pool
        cache = pool.num_usable * pool.block_size + 1
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
                f"{self.max_model_len}, and at least one token is needed for the output",
                "prompt",
            )
        if limit > cache or num_tokens >= limit:
            raise RequestTooLongError(
                f"{num_tokens} tokens, which may grow to {max(limit, num_tokens + 1)}, do not fit: "
                f"the KV cache holds {cache - 1} tokens; ask for fewer tokens, or raise "
                "kv.num_blocks",
                "max_tokens",
            )
        return limit
