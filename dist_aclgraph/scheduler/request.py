"""Request: the user's unit of work as the scheduler sees it, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.ints import pack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.step import RowLogprobs, RowSampling, RowStart

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step brought for one request; the end token of a "stop" is among the tokens."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[RowLogprobs | None, ...] = ()  # [num_token_ids], or empty if nobody asked
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


class Request:
    """One request, from ``Scheduler.add()`` to its finish. The scheduler alone changes it.

    Attributes:
        tokens: prompt and output.
        num_computed_tokens: tokens whose KV is in cache; it catches up with ``tokens``.
        num_started: tokens that the row began with; later ones were sampled.
        num_new_tokens: those that the last step brought, which the workers' row does not hold yet.
        arrival: when it came, counted in requests.
        dp_rank: the data-parallel rank that runs it; row: its place in the batch there, -1 while
            waiting.
        block_ids: its block table.
        hashes: of its full blocks, as far as they were needed; they outlive a preemption.
        num_stored_blocks: full blocks that were handed to the prefix cache.
        max_total_tokens: prompt and output together end here.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "dp_rank",
        "finish_reason",
        "hashes",
        "max_tokens",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_new_tokens",
        "num_prompt_tokens",
        "num_started",
        "num_stored_blocks",
        "request_id",
        "row",
        "sampling",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: RowSampling,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Iterable[int] = (),
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Make a request that waits.

        Args:
            sampling: final: who submits has drawn a seed, so that a resumed request goes on alike.
            max_tokens: None goes on to the end of the context.
            stop_token_ids: all ids that end the output.
            output_token_ids: generated before, by an engine that was lost.
        """
        if not prompt_token_ids:
            raise InvalidParameterError(
                "the prompt is empty; it needs at least one token", "prompt"
            )
        self.request_id = request_id
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_token_ids)
        self.tokens = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_started = 0
        self.num_new_tokens = 1
        self.num_cached_tokens = -1  # until it is first admitted
        self.num_stored_blocks = 0
        self.arrival = -1
        self.dp_rank = -1
        self.row = -1
        self.block_ids: list[int] = []
        self.hashes: list[bytes] = []
        self.finish_reason: FinishReason | None = None
        self.max_total_tokens = 0  # filled by the scheduler, as arrival is; it knows the context
        self.min_total_tokens = self.num_prompt_tokens + sampling.min_tokens

    @property
    def has_drafts(self) -> bool:
        """Whether its row has sampled, so that workers that draft have drafts for it."""
        return len(self.tokens) > self.num_started

    def start(self, dp_rank: int, row: int) -> RowStart:
        """Return the message that puts the request into a row of every worker of a rank."""
        self.dp_rank, self.row = dp_rank, row
        self.num_started = len(self.tokens)
        self.num_new_tokens = 1
        return RowStart(row, pack_ints(self.tokens), pack_ints(self.block_ids), self.sampling)

    def leave_row(self) -> None:
        """Forget row and blocks, to be computed again from the first token."""
        self.row = -1
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_stored_blocks = 0

    def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens up to the one that ends the request; return how many those are."""
        for index, token_id in enumerate(token_ids):
            self.tokens.append(token_id)
            self.finish_reason = self.finish_reason_after(token_id)
            if self.finish_reason is not None:
                return index + 1
        return len(token_ids)

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Return why the request ends with ``token_id``, its last token, or None to go on."""
        num_tokens = len(self.tokens)
        if token_id in self.stop_ids and num_tokens > self.min_total_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_total_tokens else None


def row_sampling(
    params: SamplingParams, *, seed: int, num_prompt_tokens: int, end_ids: Iterable[int]
) -> RowSampling:
    """Return the sampler's view of a request.

    Args:
        seed: used where ``params`` brings none.
        end_ids: all ids that end the output; suppressed up to ``min_tokens``.
    """
    return RowSampling(
        temperature=0.0 if params.is_greedy else float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        seed=params.seed if params.seed is not None else seed,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_tokens=num_prompt_tokens,
        suppressed=tuple(end_ids) if params.min_tokens else (),
        min_tokens=params.min_tokens,
    )
