"""A client stores the tokens of each request, so that another engine can continue the request.

Sampling depends only on seed, position and tokens. So another engine can continue a request after
its existing tokens, and samples the same next tokens as the lost engine. If ``recovery.exact`` is
not set, rounding can change the tokens. In ``OpenRequest.tokens``, the output follows the prompt;
``OpenRequest.sampling`` says where the output begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.arrays.ints import INT_BYTES
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import row_sampling
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowSampling

OnDelta = Callable[[RequestDelta], None]
# The role that an external router has chosen for a request. A "prefill" request ends when the KV of
# its prompt is in files. A "decode" request uses KV that another service has written to files.
TransferRole = Literal["", "prefill", "decode"]


@dataclass
class OpenRequest:
    """A request from its submission to its last delta. Owns its tokens.

    Attributes:
        tokens: int32, prompt and output.
        max_tokens: maximum number of output tokens, as the client requested.
        num_deaths: number of engines that died while they ran this request, counted since the
            request's last progress (``has_run``).
        num_deltas: how many times the request's present engine has sent tokens of this request.
        first_death_s: time of the first death that ``num_deaths`` counts.
        is_cause: whether the request counts as the cause of its engines' deaths. If so, the client
            does not resume the request.
        is_resumed: whether the loss of an engine, or of the link to an engine, has interrupted the
            request.
        hands_over: whether the present engine computes the prompt and the first token, and another
            engine then generates the other tokens.
        source: name of the group that has computed the prompt for another group; "" if the prompt
            was not handed over.
        role: the role that an external router has chosen; see ``TransferRole``. A "prefill" request
            needs one output token. If the engine is lost after this token, the next engine
            generates one unneeded token.
        peer: the group of another service that has computed the prompt; None if there is none.
        is_probe: whether the client made this request to test an engine; a probe is not resumed.
    """

    request_id: str
    tokens: bytearray
    sampling: RowSampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    cache_salt: str
    on_delta: OnDelta
    num_deaths: int = 0
    num_deltas: int = 0
    first_death_s: float = 0.0
    is_cause: bool = False
    is_resumed: bool = False
    hands_over: bool = False
    source: str = ""
    is_probe: bool = False
    role: TransferRole = ""
    peer: BlockSource | None = None
    _num_prompt_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_prompt_bytes = len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return (len(self.tokens) - self._num_prompt_bytes) // INT_BYTES

    @property
    def is_suspect(self) -> bool:
        """Whether this request is a suspect: a request that may have caused its engine's death.

        The request becomes a suspect when its engine dies. The request stays a suspect until it
        makes progress on another engine (``has_run``).
        """
        return self.num_deaths > 0

    @property
    def has_run(self) -> bool:
        """Whether the request has made progress on its present engine.

        The prefill generates the first new token. The second delta comes from a decode step, so it
        proves that the request survives such a step.
        """
        return self.num_deltas > 1

    @property
    def may_hand_over(self) -> bool:
        """Whether one group may compute the prompt, and another group may then generate the output.

        Three kinds of requests stay in one group: requests for log-probabilities of the prompt,
        requests for embeddings, and requests that have a ``role``.
        """
        sampling = self.sampling
        return (
            self.num_output_tokens == 0
            and self.max_tokens > 1
            and sampling.prompt_logprobs < 0
            and not sampling.embeds
            and not self.is_probe
            and not self.role
        )

    def see_death(self, now_s: float, *, is_proof: bool) -> None:
        """Record that this request's engine died.

        Args:
            now_s: the present time on a monotonic clock.
            is_proof: whether this death proves that a suspect (``is_suspect``) causes its engines'
                deaths. Has no effect if the request is no suspect. A death is a proof if three
                conditions are true: the engine had started after ``first_death_s``; the engine had
                already run another request; when the engine died, it ran no other request that may
                have caused an engine's death.
        """
        self.is_cause = is_proof and self.is_suspect
        if not self.is_suspect:
            self.first_death_s = now_s
        self.num_deaths += 1

    def note(self, delta: RequestDelta) -> None:
        """Store the tokens of a delta. If the delta shows progress, set ``num_deaths`` to 0."""
        if delta.token_ids:
            self.append(delta.token_ids)
            self.num_deltas += 1
            if self.num_deltas > 1:  # the condition of ``has_run``, repeated here for speed
                self.num_deaths = 0

    def append(self, output: bytes) -> None:
        """Append output tokens, int32."""
        self.tokens += output

    @classmethod
    def probe(cls, request_id: str) -> OpenRequest:
        """Return a request that tests an engine. The request generates one token, which no client
        reads.
        """
        sampling = row_sampling(
            SamplingParams(max_tokens=1), seed=0, num_prompt_tokens=1, end_ids=()
        )
        prompt = bytearray(INT_BYTES)  # token 0, which exists in every model
        return cls(request_id, prompt, sampling, 1, (), "", lambda delta: None, is_probe=True)

    def submit(self, number: int) -> Submit:
        """Return the message that asks an engine for the tokens that the request still needs."""
        sampling = self.sampling
        # A request with output tokens already has the prompt's log-probabilities. So no engine
        # computes these log-probabilities again.
        if self.num_output_tokens and sampling.prompt_logprobs >= 0:
            sampling = replace(sampling, prompt_logprobs=-1)
        return Submit(
            self.request_id,
            number,
            bytes(self.tokens),
            sampling,
            1 if self.hands_over else max(1, self.max_tokens - self.num_output_tokens),
            self.stop_ids,
            self.cache_salt,
            self.hands_over or self.role == "prefill",
            self.source,
            self.peer,
        )
