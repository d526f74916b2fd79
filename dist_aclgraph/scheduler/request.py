"""Request: one request of a user, as the scheduler sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from dist_aclgraph.arrays.ints import IntArray, int_list, pack_ints
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.kv.block_pool import salted_root
from dist_aclgraph.kv.look_ups import FetchBlocks, Source
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.step import PromptLogprobs, RowSampling, RowStart


class Request:
    """One request, from the call of ``Scheduler.add()`` to its end. Only the scheduler changes it.

    Attributes:
        tokens: prompt and output. While the request runs, ``RunningRows`` has newer tokens.
        max_tokens: maximum length of the output; None means that only the context limits the
            output.
        stop_ids: all token ids that end the output.
        key: a number by which the caller of the scheduler finds the request's results. The caller
            sets the key before the request is scheduled.
        arrival: a number that increases with each arriving request. The scheduler sets ``arrival``,
            ``deadline`` and ``max_total_tokens``.
        deadline: number of the step by which the whole prompt should have run. The deadline is the
            number of the step at arrival, plus one for every ``SchedulerConfig.prompt_share``
            tokens of the prompt. The request with the earliest deadline is served first. So short
            prompts that arrive later can run before a long prompt, but only until the deadline of
            the long prompt.
        max_total_tokens: maximum length of prompt and output together.
        dp_rank: the data-parallel rank that runs the request. While the request waits, the value is
            the last rank that has run the request or has looked up its files.
        row: row of the request in the batch of ``dp_rank``; -1 while the request waits.
        compiled_row: the row that the request lost because its grammar was not compiled; -1 for
            other requests. Workers compile the grammar under the number of this row.
        block_ids: the request's block table.
        hashes: hashes of the first full blocks. A hash is computed when it is first needed. A
            preempted request keeps its hashes.
        prompt_end: position where the output begins. If a request is submitted again, the submitted
            prompt ends with the existing output, so the output begins inside the submitted prompt.
        num_cached_tokens: number of prompt tokens that were found in the prefix cache; -1 until the
            request is first admitted. The number is 0 if another group has begun the request. The
            other group has already counted the cached tokens.
        prompt_logprobs: log-probabilities of the prompt tokens that were computed since the request
            last started.
        embedding: the hidden state after the prompt's last token, float32 [hidden]; empty if the
            request does not ask for it.
        admitted_s: the time at which the request last left the queue, in seconds; the caller of the
            scheduler measures it.
        prefill_s: seconds from ``admitted_s`` to the first token; the caller of the scheduler
            measures them.
        has_looked: whether the files of the request's blocks were looked up since the request began
            to wait.
        look_up: function that returns the result of a look-up of files: how many leading blocks are
            cached or have files. The function returns None until the look-up has ended. ``look_up``
            is None if no look-up runs.
        fetch: function that fetches blocks to the engine's node; another group has computed these
            blocks. The function is called at most once. None if no blocks are fetched.
        source: the group from which workers on other nodes fetch blocks; used at most once. None if
            no blocks are fetched.
        is_suspect: whether the request's logits have been NaN or infinite once. If true, the
            request is computed again, and shares no blocks with other requests.
    """

    __slots__ = (
        "admitted_s",
        "arrival",
        "block_ids",
        "cache_root",
        "compiled_row",
        "deadline",
        "dp_rank",
        "embedding",
        "fetch",
        "hands_over",
        "has_looked",
        "hashes",
        "is_over",
        "is_suspect",
        "key",
        "look_up",
        "max_tokens",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_prompt_tokens",
        "prefill_s",
        "prompt_end",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "source",
        "stop_ids",
        "tokens",
        "tries_grammar",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | IntArray,
        sampling: RowSampling,
        *,
        max_tokens: int | None = None,
        stop_token_ids: Iterable[int] = (),
        cache_salt: str = "",
        hands_over: bool = False,
    ) -> None:
        """Make a waiting request.

        Args:
            sampling: the complete sampling parameters, including a seed.
            cache_salt: requests share blocks only with requests that have the same salt.
            hands_over: whether another group continues the request after its first token.
        """
        if not len(prompt_token_ids):
            raise InvalidParameterError(
                "the prompt is empty; it needs at least one token", "prompt"
            )
        self.request_id = request_id
        self.key = -1
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(stop_token_ids)
        self.tokens = int_list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = -1
        self.arrival = -1
        self.deadline = 0
        self.dp_rank = -1
        self.row = self.compiled_row = -1
        self.block_ids: list[int] = []
        self.cache_root = salted_root(cache_salt)
        self.hashes: list[bytes] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.embedding = b""
        self.admitted_s = self.prefill_s = 0.0
        self.hands_over = hands_over
        self.has_looked = False
        self.look_up: Callable[[], int | None] | None = None
        self.fetch: FetchBlocks | None = None
        self.source: Source | None = None
        self.is_over = False
        self.tries_grammar = False  # may run with an uncompiled grammar
        self.is_suspect = False
        self.max_total_tokens = 0
        self.prompt_end = sampling.num_prompt_tokens or self.num_prompt_tokens
        # Stop tokens are forbidden before ``min_tokens``. The exception is a request with a
        # grammar, because the grammar may allow only stop tokens.
        may_end = sampling.structure is not None and sampling.structure.grammar
        self.min_total_tokens = self.prompt_end + (0 if may_end else sampling.min_tokens)

    @property
    def has_output(self) -> bool:
        """Whether the request was submitted with existing output, because another group has begun
        it.
        """
        return self.prompt_end < self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int]:
        """The sort key for the order of service: first the deadline, then the arrival."""
        return self.deadline, self.arrival

    def start(self, dp_rank: int, row: int) -> RowStart:
        """Return the message that puts the request into a row, for all workers of ``dp_rank``."""
        self.dp_rank, self.row = dp_rank, row
        return RowStart(row, pack_ints(self.tokens), pack_ints(self.block_ids), self.sampling)

    def leave_row(self) -> None:
        """Reset the row and the blocks. If the request runs again, it is computed from its first
        token.
        """
        self.row = -1
        self.block_ids = []
        self.has_looked = False
        self.look_up = None

    def num_until_stop(self, num_known: int, new: Sequence[int]) -> int | None:
        """Return the number of new tokens up to the stop token that ends the request, including the
        stop token. Return None if no stop token ends the request.

        Args:
            num_known: number of the request's tokens before the new tokens.
        """
        for count, token_id in enumerate(new, 1):
            if token_id in self.stop_ids and num_known + count > self.min_total_tokens:
                return count
        return None


def row_sampling(
    params: SamplingParams, *, seed: int, num_prompt_tokens: int, end_ids: Iterable[int]
) -> RowSampling:
    """Return the parameters of a request that the sampler needs.

    Args:
        seed: the seed that is used if ``params`` has no seed.
        end_ids: all token ids that end the output. These ids are forbidden until the output has
            ``min_tokens`` tokens.
    """
    biases = dict(params.logit_bias)
    biases |= {word[0]: -math.inf for word in params.bad_word_ids if len(word) == 1}
    structure = params.structure
    if structure is not None:
        structure = replace(structure, end_ids=tuple(end_ids))
    # If there is a grammar, the grammar alone decides whether a stop token is allowed, even before
    # ``min_tokens``.
    has_grammar = structure is not None and bool(structure.grammar)
    allowed = params.allowed_token_ids
    if allowed and has_grammar:
        allowed = (*allowed, *end_ids)
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
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        num_prompt_tokens=num_prompt_tokens,
        suppressed=tuple(end_ids) if params.min_tokens and not has_grammar else (),
        min_tokens=params.min_tokens,
        biased=pack_ints(list(biases)) if biases else b"",
        biases=np.array(list(biases.values()), "<f4").tobytes(),
        allowed=pack_ints(allowed) if allowed else b"",
        bad_words=tuple(word for word in params.bad_word_ids if len(word) > 1),
        structure=structure,
        embeds=params.returns_embedding,
    )
