"""RankScheduler: the running requests of one data-parallel rank, and their next tokens.

The scheduler does not separate prefill from decoding. In each step, the model runs tokens of a
request that are known, but whose KV is not computed yet. A new request runs chunks of its prompt. A
request that decodes runs its last sampled token and its drafts. A preempted request runs its prompt
and its output again. Requests that decode are scheduled first, and a step always has room for all
of them. The other requests get the rest of the step, in the order of their deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.scheduler.block_copies import BlockCopies
from dist_aclgraph.scheduler.decode_blocks import Lack, give_blocks, missing_blocks
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.prefixes import Prefixes
from dist_aclgraph.scheduler.rank_step import (
    Flight,
    NewTokens,
    RankStep,
    StepBuilder,
    StepKind,
)
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.request_ends import RequestEnds
from dist_aclgraph.scheduler.row_changes import RowChanges
from dist_aclgraph.scheduler.rows import EVERY, TRIES, WAITS, Indices, Places, RunningRows
from dist_aclgraph.steps.padding import padding_blocks, padding_len
from dist_aclgraph.steps.step import RankBatch

NO_INDICES = np.empty(0, np.intp)


class RankScheduler:
    """Owns the rows and the block pool of one data-parallel rank. ``Scheduler`` assigns requests to
    the ranks.

    The caller runs one step with these methods, in this order: ``lack``, ``begin``, ``start`` for
    each new request, ``build``, and ``advance`` with the step's result. The next step may be built
    before the result arrives, because only the tokens and the number of accepted drafts are unknown
    at that time.

    Args:
        index: the index of this data-parallel rank in its group.
        rows: this rank's rows, which are empty at first.
        num_drafts: number of drafts that workers make for each sampled request.
        num_prompt_ranks: number of ranks that split prompts.
        exact: if true, existing output is computed again in decode steps, one token in each step.
            If false, existing output is computed again in chunks.
        copies: decides which blocks are copied to and from files; None if KV is not copied.
    """

    def __init__(
        self,
        index: int,
        config: SchedulerConfig,
        pool: BlockPool,
        rows: RunningRows,
        num_drafts: int = 0,
        num_prompt_ranks: int = 1,
        *,
        exact: bool = False,
        copies: BlockCopies | None = None,
    ) -> None:
        self._exact = exact
        self.index = index
        self.pool = pool
        self.copies = copies
        self.prefixes = Prefixes(pool, copies)
        self.rows = rows
        self._max_tokens = config.max_num_batched_tokens
        self._max_chunk = config.prompt_share
        self._decode_len = num_drafts + 1
        self._num_prompt_ranks = num_prompt_ranks
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._changes = RowChanges(index, rows)
        self._ends = RequestEnds()
        self._steady: RankStep | None = None  # last step, if the next may have the same requests
        # The builder of quiet steps; None after a step of another kind. A quiet step decodes the
        # same requests as the previous step, and runs nothing else.
        self._quiet_builder: StepBuilder | None = None
        # Number of tokens that each request can still get in quiet steps; see ``_measure_margin``.
        self._margin = 0
        self._flights: deque[Flight] = deque()  # decided steps, oldest first
        # a request that could not start, and the number of free blocks at that time
        self._refused: tuple[Request, int] | None = None
        self.num_preemptions = 0
        # Number of verifications. One verification checks the drafts of one request in one step.
        self.num_verified = 0
        # Element n is the number of verifications that accepted n drafts.
        self._accepted = np.zeros(self._decode_len, np.int64)

    @property
    def running(self) -> list[Request]:
        """Requests that have a row, in order of admission."""
        return list(self.rows.requests)

    @property
    def num_running(self) -> int:
        return len(self.rows)

    @property
    def num_free_rows(self) -> int:
        """Number of rows that no request has."""
        return len(self._free_rows)

    @property
    def accepted_by_position(self) -> list[int]:
        """Element i says how many times the draft with the index i was accepted."""
        at_least: list[int] = self._accepted[::-1].cumsum()[::-1].tolist()
        return at_least[1:]

    # ---- deciding a step

    def lack(self) -> Lack | None:
        """Return the requests that lack blocks for the next step; None if there are none."""
        if self._is_quiet:
            return None
        return missing_blocks(self.rows, self._decode_len, self.pool.block_size)

    def must_wait(self, lack: Lack | None) -> bool:
        """Return whether the rank must wait for the steps in flight before it preempts a request.
        These steps may end requests, so that enough blocks become free.
        """
        if lack is None or not self._flights:
            return False
        return lack.num_blocks > self.pool.num_free

    def begin(
        self, lack: Lack | None, kind: StepKind = "mixed"
    ) -> tuple[StepBuilder, list[Request]]:
        """Begin a step; return its builder, and the requests that were preempted for the step.

        If ``kind`` is not "prompt", all requests that decode run in the step. If the builder has no
        work, ``begin`` has changed nothing, and the caller may drop the builder.
        """
        is_open = kind != "decode"
        if kind == "prompt":
            unserved = [] if self._is_quiet else self._unserved(kind)
            return self._builder(NO_INDICES, 0, unserved, [], is_open=is_open, kind=kind), []
        if lack is None:
            if self._quiet_builder is None:
                self._quiet_builder = self._builder(
                    EVERY, len(self.rows), [], [], is_open=is_open, kind=kind
                )
            return self._quiet_builder, []
        self._quiet_builder = None
        blocks, victims = self._make_room(lack) if len(lack.short) else ([], [])
        decodes = self.rows.decodes
        num_decoding = int(np.count_nonzero(decodes))
        builder = self._builder(
            EVERY if num_decoding == len(decodes) else np.flatnonzero(decodes),
            num_decoding,
            self._unserved(kind) if self._steady is None else [],
            blocks,
            is_open=is_open and not victims,
            kind=kind,
        )
        return builder, victims

    def _unserved(self, kind: StepKind) -> list[int]:
        """Return the indices of requests that may run and have not sampled a token, in order of
        service.
        """
        rows = self.rows
        is_unserved = (rows.known == rows.started) & (rows.held != WAITS)
        if kind != "mixed":
            is_unserved &= (rows.computed < rows.prompt_end) == (kind == "prompt")
        unserved: list[int] = np.flatnonzero(is_unserved).tolist()
        return sorted(unserved, key=lambda index: rows.requests[index].order)

    def _builder(
        self,
        decoding: Indices,
        num_decoding: int,
        unserved: list[int],
        blocks: list[int],
        *,
        is_open: bool,
        kind: StepKind,
    ) -> StepBuilder:
        return StepBuilder(
            self.rows,
            decoding,
            num_decoding,
            self._decode_len,
            self._max_tokens - num_decoding * self._decode_len,
            self._max_tokens if kind == "prompt" else self._max_chunk,
            is_open,
            deque(unserved),
            self._num_prompt_ranks,
            kind,
            self.pool.block_size,
            self.pool.checkpoints,
            blocks,
        )

    def has_room_for(self, builder: StepBuilder, request: Request) -> bool:
        """Return whether the step may start the request.

        False if no row is free, or if the step has its maximum number of tokens. Also false if the
        request could not start before, and the number of free blocks has not grown since then.
        """
        if not (builder.is_open and builder.budget > 0 and self._free_rows):
            return False
        return (
            self._refused is None
            or self._refused[0] is not request
            or self.pool.num_free > self._refused[1]
        )

    def start(self, builder: StepBuilder, request: Request, shared: Sequence[int]) -> bool:
        """Start a waiting request with ``shared``, the cached blocks of its prefix.

        The blocks of all known tokens are allocated at once. So no prompt waits for blocks between
        its chunks. Returns False if too few blocks are free.
        """
        size, num_tokens = self.pool.block_size, len(request.tokens)
        missing = -(-num_tokens // size) - len(shared)
        if missing > self.pool.num_free_without(shared):
            self._refused = (request, self.pool.num_free)
            return False
        self.pool.share(shared)
        if self.copies is not None and shared:
            self.copies.note_used(request.hashes[: len(shared)])
        allocated = self.pool.allocate(missing)
        if request.is_suspect:
            self.pool.clean_first(allocated)
        request.block_ids = [*shared, *allocated]
        cached = len(shared) * size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = 0 if request.has_output else cached
        request.prompt_logprobs = []
        builder.started.append(request.start(self.index, self._take_row(request)))
        for checkpoint in self.prefixes.checkpoint_after(request, shared):
            builder.restored += (request.row, checkpoint)
        self._ends.add(request)
        covered = len(request.block_ids) * size
        index = self.rows.add(
            request,
            computed=cached,
            covered=covered,
            next_full=cached + size,
            prompt_end=min(request.prompt_end, num_tokens) if self._exact else num_tokens,
        )
        request.tries_grammar = False
        builder.add_chunk(index)
        return True

    def _take_row(self, request: Request) -> int:
        """Take a free row and return it. A request that has waited for its grammar gets its
        previous row if this row is free, because workers keep the request's matcher under the
        number of this row.
        """
        row, request.compiled_row = request.compiled_row, -1
        if row not in self._free_rows:
            return self._free_rows.pop()
        self._free_rows.remove(row)
        return row

    def build(self, builder: StepBuilder) -> tuple[RankStep, RankBatch]:
        """Return the step and the message for workers. The step is empty if no request runs.

        If all requests of the step decode, the caller must call ``GroupRows.take_off`` for the
        step.
        """
        is_quiet = self._is_quiet and builder.is_steady
        if not builder.is_steady:
            self._steady, step = None, builder.build()
        elif self._steady is None:
            self._steady = step = builder.build()
        else:
            step = self._steady
            step.records[:, 1] = self.rows.computed
        self._margin = self._margin - self._decode_len if is_quiet else 0
        cleaned = self.pool.take_dirty()
        flight = Flight(step, step.indices, is_quiet, cleaned)
        self._flights.append(flight)
        if not isinstance(step.indices, slice):
            self.rows.take_off(step.indices, step.records)
        kept = self.prefixes.begin_checkpoints(self.rows, builder.chunks, flight)
        return step, self._changes.message(builder, step, cleaned, kept)

    def rewind(self) -> list[Request]:
        """Undo the steps in flight, because workers have lost the state of these steps.

        Requests keep their blocks. Later steps write the KV of the undone steps again before any
        step reads it. With recurrent state, a step cannot run again, because the step has
        overwritten the state from which it started. So if the model has recurrent state, all
        requests wait again, and will start from checkpoints. ``rewind`` returns these requests.
        """
        while self._flights:
            flight = self._flights.pop()
            self.prefixes.drop_checkpoints(flight)
            is_there = flight.places >= 0
            self.rows.put_back(flight.places[is_there], flight.step.records[is_there])
            self.pool.clean_first(flight.cleaned)
        self._steady, self._margin = None, 0
        self._changes.lose_rows()
        return [] if self.pool.checkpoints is None else self._preempt(self.running)

    def lose_kv(self) -> list[Request]:
        """Free all blocks and clear the prefix cache; return the requests, which wait again."""
        victims = self._preempt(self.running)
        self.pool.clear()
        self._refused = None
        return victims

    def leave_out(self) -> RankStep:
        """Exactly one step is in flight. Drop its requests that no longer run; return the step.

        When the step runs again, the step must not write the blocks of removed requests, which may
        now be in the prefix cache.
        """
        (flight,) = self._flights
        is_there = flight.places >= 0
        indices, records = flight.places[is_there], flight.step.records[is_there]
        records[:, 1] = (self.rows.computed - self.rows.flying)[indices]
        num_decoding = int(is_there[: flight.step.num_decoding].sum())
        step = replace(flight.step, indices=indices, records=records, num_decoding=num_decoding)
        flight.step, flight.indices = step, indices
        return step

    def again(self, step: RankStep) -> RankBatch:
        """Return the message that makes the workers run the only step in flight again.

        Workers already have the step's rows. The message adds the tokens of the previous step.
        """
        return RankBatch(step.records.tobytes(), self._changes.take_tokens())

    def has_room_for_padding(self, step: RankStep, graph: BatchDescriptor, max_len: int) -> bool:
        """Return whether a full graph's padding fits in the block table and in the cache.

        All padding uses the dummy block. If ``BlockPool.counts_shared`` is true, attention counts a
        block once for each use. In this case, the padding must also fit in the cache.

        Args:
            max_len: maximum length of a request; a row of the block table has room for it.
        """
        pool, can_be_long = self.pool, graph.num_tokens > max_len
        if not (can_be_long or pool.counts_shared):
            return True
        num_tokens = int(step.records[:, 2].sum())
        if can_be_long and padding_len(graph, num_tokens, step.num_reqs) > max_len:
            return False
        if not pool.counts_shared:
            return True
        padding = padding_blocks(graph, num_tokens, step.num_reqs, pool.block_size)
        return padding <= pool.num_blocks - pool.num_used

    # ---- after a step

    def release_non_finite(self, new: NewTokens) -> list[Request]:
        """Release and return the requests of the oldest step whose logits were NaN or infinite.

        Their blocks might contain NaN, so workers clean the blocks before other requests use them.
        """
        flight = self._flights[0]
        samples = np.flatnonzero(flight.step.records[:, 3] > 0)
        places = flight.places[samples[new.non_finite]]
        found = [self.rows.requests[place] for place in places[places >= 0].tolist()]
        for request in found:
            self.pool.condemn(request.block_ids)
            if self.copies is not None:
                self.copies.condemn(request.hashes)
        if found:
            self._release(found)
        return found

    def release_failed(self, new: NewTokens) -> list[tuple[Request, str]]:
        """Release and return the requests that failed in the oldest step, with the reasons."""
        if not new.failed:
            return []
        flight = self._flights[0]
        samples = np.flatnonzero(flight.step.records[:, 3] > 0)
        places = [(int(flight.places[samples[index]]), why) for index, why in new.failed.items()]
        found = [(self.rows.requests[place], why) for place, why in places if place >= 0]
        if found:
            self._release([request for request, _ in found])
        return found

    def hold(self, unmasked: Collection[int], compiling: Collection[int]) -> dict[Request, int]:
        """Let requests wait for their grammars. Return the requests that lose their rows, and these
        rows.

        A request that the oldest step has sampled without its grammar's mask is removed from all
        steps in flight. The request waits until all ranks have compiled its grammar. If the model
        has recurrent state, the request loses its row, because its last tokens must run again.

        Args:
            unmasked: requests sampled without a mask, as indices among the sampled requests.
            compiling: rows whose grammars are not compiled on every rank.
        """
        rows = self.rows
        victims: dict[Request, int] = {}
        if unmasked:
            flight = self._flights[0]
            places = flight.places[np.flatnonzero(flight.step.records[:, 3] > 0)[list(unmasked)]]
            places = places[places >= 0]
            if self.pool.checkpoints is None:
                self._take_back(places)
            else:
                victims = {request: request.row for request in rows.select(places)}
                self._preempt(list(victims))
                for request, row in victims.items():
                    request.compiled_row = row
                # Workers report a compiled grammar by the row number of its request. So the rows of
                # ``victims`` are the last rows that other requests get.
                left = list(victims.values())
                self._free_rows = [*left, *(row for row in self._free_rows if row not in left)]
        if self._steady is None and rows.held.any():
            rows.held[:] = (rows.held > 0) & np.isin(rows.row, list(compiling))
        return victims

    def _take_back(self, places: Places) -> None:
        """Undo the steps in flight for some requests, and send their rows to the workers again."""
        for flight in self._flights:
            at = flight.places
            is_taken = np.isin(at, places)
            self.rows.put_back(at[is_taken], flight.step.records[is_taken])
            flight.indices = np.where(is_taken, -1, at)
        self._steady = None
        self.rows.held[places] = WAITS
        self._changes.drop(self.rows.row[places].tolist())
        for place in places.tolist():
            self._changes.renew(place)

    def free_held(self) -> int:
        """Let requests that wait for their grammars run again; return the number of these requests.

        Only the result of a step shows whether a grammar is compiled. With recurrent state, a
        request loses its row if it samples a token before its grammar is compiled. So such a
        request runs its known tokens one by one, until a result shows that its grammar is compiled.
        """
        is_held = self.rows.held == WAITS
        self.rows.held[is_held] = 0 if self.pool.checkpoints is None else TRIES
        return int(is_held.sum())

    def advance(self, new: NewTokens) -> tuple[StepOutputs, list[Request]]:
        """Apply the oldest step's results; return the new tokens and the finished requests."""
        flight = self._flights.popleft()
        rows, indices, records = self.rows, flight.indices, flight.step.records
        if new.prompts or new.embeddings:
            self._keep_reports(flight, new)
        samples: Indices = EVERY
        sampled = indices
        if not isinstance(indices, slice):
            if (indices < 0).any():
                indices, records, new = _still_there(indices, records, new)
            samples = np.flatnonzero(records[:, 3])
            sampled = indices[samples]
        passed = None
        if new.counts is not None:
            self.num_verified += int(rows.can_verify[indices][records[:, 3] > 1].sum())
            self._accepted += np.bincount(new.counts - 1, minlength=self._decode_len)
            passed = np.zeros(len(records), np.int32)
            passed[samples] = new.counts - 1
        new, reasons = self._ends.cut(rows, sampled, new, is_quiet=flight.is_quiet)
        firsts = NO_INDICES
        if flight.step.num_decoding < flight.step.num_reqs:
            firsts = np.flatnonzero(rows.received[sampled] == rows.started[sampled])
        if isinstance(indices, slice) and new.counts is None:
            rows.land_tokens(indices, new.token_ids)
        else:
            rows.land(indices, records, passed)
            rows.append(sampled, new.token_ids, new.counts)
        requests = rows.select(sampled)
        ends = None if new.counts is None else np.cumsum(new.counts, dtype=np.int32)
        outputs = StepOutputs(
            requests, rows.key[sampled].copy(), new.token_ids, ends, firsts, reasons, new.logprobs
        )
        self._changes.add_tokens(rows.row[sampled], new)
        if not flight.is_quiet:
            self.prefixes.store_full_blocks(rows, indices)
            self._margin = self._measure_margin()
        if flight.kept:
            self.prefixes.end_checkpoints(flight)
        finished = [requests[index] for index in reasons]
        if finished:
            self._release(finished)
        return outputs, finished

    def only_decodes(self, new: NewTokens) -> bool:
        """Whether the oldest step has one token for each running request, and none is a stop token.

        A request can still end at its maximum length.
        """
        flight = self._flights[0]
        return (
            isinstance(flight.indices, slice)
            and 0 < flight.step.num_reqs == len(self.rows)
            and new.is_plain
            and not self._ends.has_stops(new.token_ids.tolist())
        )

    def land(self, appended: IntArray, margin: int, *, has_full: bool) -> None:
        """Finish ``advance`` for a step whose tokens ``GroupRows`` has stored.

        Args:
            appended: [num_requests, 2], row and token id of each request.
            margin: the smallest value of ``Columns.margins``, if no block is full.
            has_full: whether at least one request has filled a block.
        """
        flight = self._flights.popleft()
        self._changes.append(appended)
        if not flight.is_quiet:
            if has_full:
                self.prefixes.store_full_blocks(self.rows, flight.indices)
                margin = self._measure_margin()
            self._margin = margin

    def _keep_reports(self, flight: Flight, new: NewTokens) -> None:
        """Store log-probabilities of prompts, and hidden states, in the requests that want them."""
        requests = self.rows.requests
        for prompt in new.prompts:
            if (place := flight.places[prompt.place]) >= 0:
                requests[place].prompt_logprobs.append(prompt)
        samples = np.flatnonzero(flight.step.records[:, 3])
        for index, embedding in new.embeddings.items():
            if (place := flight.places[samples[index]]) >= 0:
                requests[place].embedding = embedding

    @property
    def _is_quiet(self) -> bool:
        """Whether the next step is quiet. A quiet step has the requests of the previous step. In a
        quiet step, no request can reach its maximum length, fill a block or need a new block.
        """
        return self._steady is not None and self._margin >= self._decode_len

    def _measure_margin(self) -> int:
        """Return the smallest value of ``Columns.margins`` of all requests."""
        return int(self.rows.margins().min()) if len(self.rows) else 0

    # ---- requests that leave

    def abort(self, request: Request) -> None:
        """Remove a running request; its results from steps in flight are dropped.

        Steps in flight can still write to the request's blocks. This does no harm, because a step
        that uses the blocks for another request begins after these steps.
        """
        self._release([request])

    def _preempt(self, requests: Sequence[Request]) -> list[Request]:
        """Release the rows and blocks of requests, which wait again; return these requests."""
        if requests:
            self._release(requests)
        self.num_preemptions += len(requests)
        return list(requests)

    def _release(self, requests: Sequence[Request]) -> None:
        self._steady = None
        moves = self.rows.remove([self.rows.index_of(request) for request in requests])
        for flight in self._flights:
            flight.move(moves)
        self._changes.drop([request.row for request in requests])
        self._ends.remove(requests)
        for request in requests:
            self.pool.free(request.block_ids)
            self._free_rows.append(request.row)
            request.leave_row()

    def _make_room(self, lack: Lack) -> tuple[list[int], list[Request]]:
        """Allocate blocks for the decoding requests that need more blocks for their next tokens.

        If too few blocks are free, requests are preempted, in reverse order of service.

        Returns:
            The result of ``give_blocks``, and the preempted requests.
        """
        victims: list[Request] = []
        while lack.num_blocks > self.pool.num_free:
            victim = max(self.rows.requests, key=lambda request: request.order)
            victims += self._preempt([victim])
            lack = missing_blocks(self.rows, self._decode_len, self.pool.block_size)
        return give_blocks(self.rows, self.pool, lack), victims


def _still_there(
    indices: Places, records: IntArray, new: NewTokens
) -> tuple[Places, IntArray, NewTokens]:
    """Return the indices, records and results of the step's requests that still run."""
    is_there = indices >= 0
    samples = records[:, 3] > 0
    counts = np.ones(int(samples.sum()), np.int32) if new.counts is None else new.counts
    return indices[is_there], records[is_there], new.cut(np.where(is_there[samples], counts, 0))
