"""Generates the choices of one HTTP request, from submission to the last piece of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from starlette.types import Receive

from dist_aclgraph.actors.client.token_log import TransferRole
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.messages import error_of
from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.formats.events import Event
from dist_aclgraph.formats.scanner import Reader
from dist_aclgraph.sampling import SamplingParams, chosen_seed, seed_of_choice
from dist_aclgraph.serve.observe.request_account import CLIENT_GONE, RequestAccount
from dist_aclgraph.serve.openai.errors import GenerationTimeoutError
from dist_aclgraph.serve.openai.inbox import Inbox
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.journal import Journal
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs
from dist_aclgraph.text.output import OutputText, end_ids

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before it got the response."""


class ChoicePiece(msgspec.Struct, frozen=True):
    """New text of one choice.

    Attributes:
        token_texts: the text of each token that has an entry in ``logprobs``.
        prompt_logprobs: if requested, one row for each token of the prompt except the first token.
            Only the first piece of a choice contains these rows.
        has_end_token: whether the last entry of ``logprobs`` is for a stop token, which has no
            text.
        events: for a chat, the text as events.
        embedding: the prompt's hidden state, float32 [hidden]; empty if not requested.
        stop_reason: in the last piece, the requested stop string or stop token that ended the text.
    """

    index: int
    text: str
    logprobs: tuple[RowLogprobs, ...]
    token_texts: tuple[str, ...]
    finish_reason: str | None
    token_ids: list[int]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    has_end_token: bool = False
    events: tuple[Event, ...] = ()
    embedding: bytes = b""
    stop_reason: int | str | None = None


class Sink(Protocol):
    """Receives the pieces of a generation, on the event loop's thread."""

    def add_piece(self, piece: ChoicePiece) -> None:
        """Accept the next piece of a choice. The last piece has a finish reason.

        Each delta becomes one piece. A piece without text shows clients that the generation
        continues.
        """
        ...

    def finish(self, error: Exception | None) -> None:
        """Called once, when all choices have ended or one choice has failed."""
        ...


@dataclass
class _RunningChoice:
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    output: OutputText
    request_id: str
    started_s: float
    last_token_s: float
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_done: bool = False
    group: str = ""  # see ``RequestDelta.group``
    has_prompt_logprobs: bool = False
    # Tokens (int32) that a previous process has received from an engine.
    tokens_before: bytearray = field(default_factory=bytearray)


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


def _no_reader() -> None:
    return None


@dataclass
class Generation:
    """Owns the unfinished engine requests and the journal of one HTTP request.

    Choices are numbered prompt by prompt, with ``num_choices`` choices for each prompt. The seed of
    a prompt's choice j is seed + j. The engine computes a prompt's log-probabilities only for the
    prompt's first choice. The pieces of the other choices wait for these log-probabilities.
    ``close`` aborts all requests that still run.

    Attributes:
        make_reader: a function that returns a new reader for a choice's answer; None if answers are
            only text.
        max_calls: an answer ends after this number of calls; None if there is no limit.
        role: the role that an external router has chosen; see ``OpenRequest.role``.
        peer: see ``OpenRequest.peer``.
        account: the request's account; None if there are neither an access log nor traces.
    """

    state: ApiState
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]  # one per prompt
    num_choices: int
    cache_salt: str  # only requests with the same salt share cached blocks
    journal: Journal
    make_reader: Callable[[], Reader | None] = _no_reader
    max_calls: int | None = None
    account: RequestAccount | None = None
    role: TransferRole = ""
    peer: BlockSource | None = None
    _choices: list[_RunningChoice] = field(default_factory=list)
    # For each prompt: its log-probabilities, and the pieces that wait for these log-probabilities.
    _reports: dict[int, tuple[PromptLogprobs, ...]] = field(default_factory=dict)
    _waiting: dict[int, list[ChoicePiece]] = field(default_factory=dict)
    _num_slots: int = 0  # number of slots that ``start`` has acquired
    _num_open: int = 0  # number of choices that have not ended
    _timer: asyncio.TimerHandle | None = None  # timer of ``serve.generation_s``

    def start(self, sink: Sink) -> None:
        """Submit all choices. ``sink`` first gets the pieces in the journal, then new pieces."""
        inbox, outbox = self.state.boxes()
        now_s = time.monotonic()
        if self.account is not None:
            self.account.submitted_s = self.account.submitted_s or now_s
        num_others = len(self.prompts) * self.num_choices - 1
        self.state.slots.acquire(num_others, is_owed=self.journal.is_resumed)
        self._num_slots = num_others
        self._num_open = num_others + 1
        chance = self.journal.chance.seed
        for prompt_ids, params in zip(self.prompts, self.params, strict=True):
            seed = chosen_seed(params)
            seed = chance + len(self._choices) if seed is None else seed
            for j in range(self.num_choices):
                own = replace(params, seed=seed_of_choice(seed, j))
                if j:
                    own = replace(own, prompt_logprobs=None)
                self._add(prompt_ids, own, now_s)
        for entry in self.journal.take_entries():
            choice = self._choices[entry.index]
            choice.tokens_before += entry.token_ids
            self._hand_on(sink, choice, entry.delta(choice.request_id), now_s)
        for choice in self._choices:
            if self._num_open and not choice.is_done:
                self._submit(inbox, sink, choice)
                outbox.note()
        self._limit_time(sink)

    def close(self) -> None:
        """Abort all requests that still run; the sink gets no more pieces. Idempotent."""
        self._num_open = 0
        if self._timer is not None:
            self._timer.cancel()
        self.journal.end()
        self.state.slots.release(self._num_slots)
        self._num_slots = 0
        for choice in self._choices:
            if not choice.is_done:
                if self.account is not None:
                    self.account.error = self.account.error or CLIENT_GONE
                choice.is_done = True
                self.state.client.abort(choice.request_id)
                self._finish(choice, "abort", time.monotonic())

    @property
    def group(self) -> str:
        """Name of the group that has computed the prompt; see ``RequestDelta.group``."""
        return self._choices[0].group

    @property
    def usage(self) -> Usage:
        firsts = self._choices[:: self.num_choices]
        return Usage(
            sum(len(choice.prompt_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_cached_tokens for choice in firsts),
            sum(choice.output.num_thought_tokens for choice in self._choices),
        )

    def _limit_time(self, sink: Sink) -> None:
        limit_s = self.state.config.serve.generation_s
        if limit_s is None:
            return
        passed_s = 0.0
        # wall clock, because the monotonic clocks of two processes can differ
        if self.journal.is_resumed:
            passed_s = time.time() - self.journal.chance.created_s

        def overrun() -> None:
            if self._num_open:
                late = GenerationTimeoutError(f"the answer was not complete after {limit_s:g} s")
                self._fail(sink, late)

        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, limit_s - passed_s), overrun)

    def _add(self, prompt_ids: list[int], params: SamplingParams, now_s: float) -> None:
        output = OutputText(
            self.state.tokenizer, prompt_ids, params, self.make_reader(), self.max_calls
        )
        request_id = self.state.new_id("req")
        index = len(self._choices)
        choice = _RunningChoice(
            index, prompt_ids, params, output, request_id, now_s, last_token_s=now_s
        )
        self._choices.append(choice)

    def _submit(self, inbox: Inbox, sink: Sink, choice: _RunningChoice) -> None:
        self.state.client.submit(
            choice.request_id,
            choice.prompt_ids,
            choice.params,
            end_ids(self.state.tokenizer, choice.params),
            partial(inbox.put, partial(self._take, sink, choice)),
            cache_salt=self.cache_salt,
            output=bytes(choice.tokens_before),
            role=self.role,
            peer=self.peer,
            wakes=False,
        )

    def _take(self, sink: Sink, choice: _RunningChoice, delta: RequestDelta, now_s: float) -> None:
        if self._num_open and not choice.is_done:
            self.journal.note(choice.index, delta)
            num_before = choice.num_tokens
            self._hand_on(sink, choice, delta, now_s)
            if choice.num_tokens > num_before:
                self._observe(choice, delta, is_first=not num_before, now_s=now_s)

    def _hand_on(
        self, sink: Sink, choice: _RunningChoice, delta: RequestDelta, now_s: float
    ) -> None:
        try:
            for piece in self._with_report(self._advance(choice, delta, now_s)):
                sink.add_piece(piece)
        except Exception as e:  # any exception: the client must get an error
            self._fail(sink, e)
            return
        if choice.is_done:
            self._num_open -= 1
            if not self._num_open:
                sink.finish(None)

    def _fail(self, sink: Sink, error: Exception) -> None:
        self._num_open = 0
        if self.account is not None:
            self.account.error = type(error).__name__
        sink.finish(error)

    def _advance(self, choice: _RunningChoice, delta: RequestDelta, now_s: float) -> ChoicePiece:
        """Return the piece of text that one delta adds.

        Raises:
            DistAclGraphError: the choice has failed.
        """
        reason: str | None = delta.finish_reason
        if reason in ("error", "abort"):
            choice.is_done = True
            self._finish(choice, reason, now_s)
            if reason == "abort":
                raise EngineUnavailableError(delta.error or "the server ended the request")
            raise error_of(delta)
        piece = choice.output.add_tokens(delta.tokens, delta.logprobs, reason)
        choice.num_tokens += len(piece.token_ids)
        choice.group = delta.group
        choice.num_cached_tokens = max(choice.num_cached_tokens, delta.num_cached_tokens)
        if piece.finish_reason is not None:
            # A stop string has ended the choice. The engine does not find stop strings, and would
            # continue.
            if reason is None:
                self.state.client.abort(choice.request_id)
            choice.is_done = True
            self._finish(choice, piece.finish_reason, now_s)
        has_end_token = piece.has_end_token and bool(piece.logprobs)
        texts = (*piece.token_texts, "") if has_end_token else piece.token_texts
        # The engine sends prompt log-probabilities again after a preemption.
        prompt = () if choice.has_prompt_logprobs else delta.prompt_logprobs
        choice.has_prompt_logprobs |= bool(prompt)
        return ChoicePiece(
            choice.index,
            piece.text,
            piece.logprobs,
            texts,
            piece.finish_reason,
            piece.token_ids,
            prompt,
            has_end_token,
            piece.events,
            delta.embedding,
            choice.output.stop_reason,
        )

    def _with_report(self, piece: ChoicePiece) -> list[ChoicePiece]:
        """Return the pieces that may be sent now.

        All pieces of a prompt wait until the prompt's log-probabilities have arrived.
        """
        if self.num_choices == 1:
            return [piece]
        prompt, place = divmod(piece.index, self.num_choices)
        if self.params[prompt].prompt_logprobs is None:
            return [piece]
        if not place:  # the first piece of the first choice contains the log-probabilities
            self._reports.setdefault(prompt, piece.prompt_logprobs)
        if prompt not in self._reports:
            self._waiting.setdefault(prompt, []).append(piece)
            return []
        pieces = [piece, *self._waiting.pop(prompt, ())]
        return [self._first_with_report(each, self._reports[prompt]) for each in pieces]

    def _first_with_report(
        self, piece: ChoicePiece, report: tuple[PromptLogprobs, ...]
    ) -> ChoicePiece:
        choice = self._choices[piece.index]
        if choice.has_prompt_logprobs:
            return piece
        choice.has_prompt_logprobs = True
        return msgspec.structs.replace(piece, prompt_logprobs=report)

    def _finish(self, choice: _RunningChoice, reason: str, now_s: float) -> None:
        if self.account is not None:
            self.account.finish_reason = reason
            self.account.num_tokens += choice.num_tokens
            if choice.index % self.num_choices == 0:
                self.account.num_prompt_tokens += len(choice.prompt_ids)
        self.state.metrics.finished(
            reason,
            now_s - choice.started_s,
            num_prompt_tokens=len(choice.prompt_ids),
            num_tokens=choice.num_tokens,
        )

    def _observe(
        self, choice: _RunningChoice, delta: RequestDelta, *, is_first: bool, now_s: float
    ) -> None:
        if is_first:
            self.state.metrics.first_token(now_s - choice.started_s)
            if self.account is not None and self.account.first_token_s is None:
                self.account.first_token_s = now_s
                self.account.prefill_s = delta.prefill_s
        else:
            self.state.metrics.next_tokens(now_s - choice.last_token_s)
        choice.last_token_s = now_s


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``, unless the client disconnects first.

    The caller must have read the request's body, so that the next message from ``receive`` reports
    the end of the connection.

    Raises:
        ClientGoneError: the client closed the connection; ``work`` is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
