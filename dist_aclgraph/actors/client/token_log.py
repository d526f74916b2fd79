"""The tokens of a request, which a client stores so that another engine can continue the request.

Sampling is a function of seed, position and token. So if a request is submitted again with its
existing tokens, its next tokens are the same as without the loss. Only rounding may change the
tokens, unless ``recovery.exact`` is set. The output follows the prompt; ``sampling`` says where the
output begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.ints import INT_BYTES
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowSampling

# If this number of consecutive engines died while they ran the same request, the request may be the
# cause.
MAX_LOSSES = 3

OnDelta = Callable[[RequestDelta], None]


@dataclass
class OpenRequest:
    """A request from its submission to its last delta. Owns its tokens.

    Attributes:
        tokens: int32, prompt and output.
        max_tokens: maximum number of output tokens, as the client asked.
        losses: number of consecutive engines that died while they ran this request.
        is_resumed: whether the request has lost an engine, or the link to an engine.
    """

    request_id: str
    tokens: bytearray
    sampling: RowSampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    cache_salt: str
    on_delta: OnDelta
    losses: int = 0
    is_resumed: bool = False
    _num_prompt_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._num_prompt_bytes = len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return (len(self.tokens) - self._num_prompt_bytes) // INT_BYTES

    @property
    def may_kill(self) -> bool:
        """Whether the request may have killed its engines; if so, no other engine gets it."""
        return self.losses >= MAX_LOSSES

    def see_others_loss(self) -> None:
        """Record that an engine died that did not run this request: it is not the cause."""
        self.losses = 0

    def note(self, delta: RequestDelta) -> None:
        """Store the tokens that were handed out."""
        self.append(delta.token_ids)

    def append(self, output: bytes) -> None:
        """Append output tokens, int32."""
        self.tokens += output

    def submit(self, number: int) -> Submit:
        """Return the message that asks an engine for the missing tokens."""
        sampling = self.sampling
        if self.num_output_tokens and sampling.prompt_logprobs >= 0:  # sent with the first token
            sampling = replace(sampling, prompt_logprobs=-1)
        return Submit(
            self.request_id,
            number,
            bytes(self.tokens),
            sampling,
            self.max_tokens - self.num_output_tokens,
            self.stop_ids,
            self.cache_salt,
        )
