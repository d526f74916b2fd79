"""The token log: what a client keeps of a request, so that another engine can continue it.

Sampling is a function of seed, position and token, so a request that is submitted again with the
tokens it has gets the tokens that it would have had (but for rounding, unless
``recovery.exact``). The output follows the prompt; ``sampling`` has the place where it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dist_aclgraph.actors.wire.messages import Submit
from dist_aclgraph.ints import INT_BYTES
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowSampling

# A request that was running when so many engines died in a row may be what killed them.
MAX_LOSSES = 3

OnDelta = Callable[[RequestDelta], None]


@dataclass
class OpenRequest:
    """A request from its submission to its last delta. Owns its tokens.

    Attributes:
        tokens: int32, of prompt and output.
        max_tokens: of the output, as asked for.
        losses: engines that died last, one after the other, while they ran it.
        is_resumed: whether it has lost an engine, or the link to one.
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
        """Whether it may be the cause of its engines' deaths, and must not reach another one."""
        return self.losses >= MAX_LOSSES

    def see_others_loss(self) -> None:
        """An engine died without running it: engines die of something else."""
        self.losses = 0

    def note(self, delta: RequestDelta) -> None:
        """Keep the tokens that were handed out."""
        self.append(delta.token_ids)

    def append(self, output: bytes) -> None:
        """Add output, int32."""
        self.tokens += output

    def submit(self, number: int) -> Submit:
        """Return the message that asks an engine for the rest of its tokens."""
        sampling = self.sampling
        if self.num_output_tokens and sampling.prompt_logprobs >= 0:  # came with the first token
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
