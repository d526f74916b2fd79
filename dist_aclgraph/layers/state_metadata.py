"""The slots and lengths of a step's requests, for layers that keep a state for each request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PromptStates:
    """The requests of a step whose prompts are computed; their tokens follow the direct tokens.

    Attributes:
        query_lens: [m] int32, number of tokens of each request in this step.
        query_ends: number of tokens of the first request, of the first two requests, and so on.
        slots: [m] int32, the slot of each request. The state before the step is read from it, and
            the state after the step is written to it.
        goes_on: [m] bool, whether the request has a state. False for a request whose first token
            runs: it starts from zeros, whatever the slot contains.
    """

    query_lens: Tensor
    query_ends: tuple[int, ...]
    slots: Tensor
    goes_on: Tensor


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """Where the state of each request is; all layers with a state use the same value.

    The first requests of a step are direct: each runs the same number of tokens, its last token and
    its drafts. Slot 0 belongs to padding. In a full graph, all requests are direct, and every
    tensor is a static input or is computed from static inputs.

    Attributes:
        slots: [num_direct, query_len] int32. The state after token t of a request is written to
            ``slots[request, t]``. Padding requests have slot 0 everywhere.
        lens: [num_direct] int32, the number of tokens of each request, always ``query_len``.
        accepted: [num_direct] int32, from 1 to ``query_len``: the state before the step is in
            ``slots[request, accepted - 1]``. It is 1 without drafts.
        prompts: the requests after the direct requests; None if there are none, as in a full graph.
    """

    slots: Tensor
    lens: Tensor
    accepted: Tensor
    prompts: PromptStates | None = None

    @property
    def num_direct_tokens(self) -> int:
        return self.slots.numel()
