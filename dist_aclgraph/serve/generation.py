"""Generation: the choices of one HTTP request, from submission to their last piece of text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request

from dist_aclgraph.actors.messages import error_of
from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.ints import unpack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.state import ApiState
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.output import OutputText, end_ids

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads an answer."""


@dataclass(frozen=True)
class ChoicePiece:
    """What is new in one choice; ``logprobs`` leave out an end token."""

    index: int
    text: str
    logprobs: tuple[RowLogprobs, ...]
    finish_reason: str | None


Pieces = AsyncIterator[ChoicePiece]


@dataclass
class _Choice:
    prompt_ids: list[int]
    output: OutputText
    request_id: str
    started_s: float
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_done: bool = False


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Generation:
    """Owns the outstanding engine requests of one HTTP request.

    Choices are numbered prompt by prompt, ``num_choices`` each; choice j of a prompt is seeded
    with seed + j. Use as a context manager: leaving it aborts whatever still runs.
    """

    state: ApiState
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]  # one per prompt
    num_choices: int = 1
    cache_salt: str = ""  # cached blocks are shared with requests of the same salt only
    _choices: list[_Choice] = field(default_factory=list)
    _num_places: int = 0  # taken beside the one that the HTTP request has
    _arrived: asyncio.Queue[tuple[int, RequestDelta]] = field(default_factory=asyncio.Queue)

    def __enter__(self) -> Generation:
        loop = asyncio.get_running_loop()
        num_others = len(self.prompts) * self.num_choices - 1
        self.state.places.take(num_others)
        self._num_places = num_others
        try:
            for prompt_ids, params in zip(self.prompts, self.params, strict=True):
                seed = params.seed if params.seed is not None else self.state.draw_seed()
                for j in range(self.num_choices):
                    self._submit(loop, prompt_ids, replace(params, seed=_wrap(seed + j)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs. Idempotent."""
        self.state.places.give_back(self._num_places)
        self._num_places = 0
        for choice in self._choices:
            if not choice.is_done:
                choice.is_done = True
                self.state.client.abort(choice.request_id)
                self._finish(choice, "abort", time.monotonic())

    @property
    def usage(self) -> Usage:
        firsts = self._choices[:: self.num_choices]
        return Usage(
            sum(len(choice.prompt_ids) for choice in firsts),
            sum(choice.num_tokens for choice in self._choices),
            sum(choice.num_cached_tokens for choice in firsts),
        )

    async def pieces(self) -> Pieces:
        """Yield pieces of all choices as they come, each choice's last with a finish reason.

        There is one for every delta, also where its tokens have no text (yet): clients see by them
        that the request goes on.

        Raises:
            DistAclGraphError: a choice failed; the others are aborted on close.
        """
        while any(not choice.is_done for choice in self._choices):
            index, delta = await self._arrived.get()
            choice = self._choices[index]
            if choice.is_done:
                continue
            yield self._advance(index, choice, delta)

    def _submit(
        self, loop: asyncio.AbstractEventLoop, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        index = len(self._choices)
        request_id = self.state.new_id("req")

        def on_delta(delta: RequestDelta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
                loop.call_soon_threadsafe(self._arrived.put_nowait, (index, delta))

        tokenizer = self.state.tokenizer
        self.state.client.submit(
            request_id,
            prompt_ids,
            params,
            end_ids(tokenizer, params),
            on_delta,
            cache_salt=self.cache_salt,
        )
        output = OutputText(tokenizer, params)
        self._choices.append(_Choice(prompt_ids, output, request_id, time.monotonic()))

    def _advance(self, index: int, choice: _Choice, delta: RequestDelta) -> ChoicePiece:
        now_s = time.monotonic()
        reason: str | None = delta.finish_reason
        if reason in ("error", "abort"):
            choice.is_done = True
            self._finish(choice, reason, now_s)
            if reason == "abort":
                raise EngineUnavailableError(delta.error or "the server ended the request")
            raise error_of(delta)
        ids = unpack_ints(delta.token_ids).tolist()
        piece = choice.output.take(ids, delta.logprobs, reason)
        self._observe(choice, len(piece.token_ids), now_s)
        choice.num_tokens += len(piece.token_ids)
        choice.num_cached_tokens = max(choice.num_cached_tokens, delta.num_cached_tokens)
        if piece.finish_reason is not None:
            if reason is None:  # a stop string, of which the engine knows nothing
                self.state.client.abort(choice.request_id)
            choice.is_done = True
            self._finish(choice, piece.finish_reason, now_s)
        shown = piece.logprobs[:-1] if piece.has_end_token else piece.logprobs
        return ChoicePiece(index, piece.text, shown, piece.finish_reason)

    def _finish(self, choice: _Choice, reason: str, now_s: float) -> None:
        self.state.metrics.finished(
            reason,
            now_s - choice.started_s,
            num_prompt_tokens=len(choice.prompt_ids),
            num_tokens=choice.num_tokens,
        )

    def _observe(self, choice: _Choice, num_tokens: int, now_s: float) -> None:
        if num_tokens and not choice.num_tokens:
            self.state.metrics.first_token(now_s - choice.started_s)
        elif num_tokens:
            self.state.metrics.next_tokens(now_s - choice.last_token_s)
        choice.last_token_s = now_s


def _wrap(seed: int) -> int:
    """Keep seed + j within int64."""
    return (seed + 2**63) % 2**64 - 2**63


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` gives, unless the client goes away first.

    The body must have been read: what comes next on the connection is then its end.

    Raises:
        ClientGoneError: the client closed the connection; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
