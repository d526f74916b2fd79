"""The inputs of a step on the host, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dist_aclgraph.ints import IntArray
from dist_aclgraph.steps.draft_places import DraftPlaces

if TYPE_CHECKING:
    from dist_aclgraph.steps.prompt_share import PromptShare


@dataclass(frozen=True)
class HostStep:
    """The work of one step on one rank, in batch order; ``DeviceStep`` uses the same names.

    The arrays are never modified. An unchanged value may be the same array object as in the
    previous step; then a copy of the previous array stays valid.

    Attributes:
        rows: [num_reqs], row of each request.
        token_ids, positions, slots: [num_tokens]. If only the device knows a token, its id is a
            reference (``references.py``). If the row has no block for a token, the slot is in the
            dummy block.
        query_ends, kv_lens: [num_reqs], cumulative query lengths and KV lengths.
        block_table: [num_reqs, num_blocks], as wide as the longest request and its drafts need.
        sampled: [num_samples], indices in the batch of the requests that get tokens.
        sampled_rows: [num_samples], rows of these requests.
        num_logits: [num_samples], number of sampled places of each request.
        places: [num_samples * (k + 1)], indices of the sampled tokens among the step's tokens; a
            request with fewer places repeats its last place.
        next_tokens: [num_tokens], the token after each of the step's tokens; 0 if the host does not
            know that token. Empty if the model does not draft.
        drafts: the places where drafting continues; None if the model does not draft.
        prompts: the work of the other prefill ranks, if prompts are split between ranks; else None.
            If prompts are split, this object has the tokens and places of this rank, but the
            requests of the whole step.
    """

    rows: IntArray
    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    query_ends: IntArray
    kv_lens: IntArray
    block_table: IntArray
    sampled: npt.NDArray[np.intp]
    sampled_rows: IntArray
    num_logits: IntArray
    places: IntArray
    next_tokens: IntArray
    drafts: DraftPlaces | None
    prompts: PromptShare | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.sampled)


NO_INTS = np.empty(0, np.int32)
NO_RECORDS = np.empty((0, 4), np.int32)
NO_STEP = HostStep(
    rows=NO_INTS,
    token_ids=NO_INTS,
    positions=NO_INTS,
    slots=NO_INTS,
    query_ends=NO_INTS,
    kv_lens=NO_INTS,
    block_table=np.empty((0, 1), np.int32),
    sampled=np.empty(0, np.intp),
    sampled_rows=NO_INTS,
    num_logits=NO_INTS,
    places=NO_INTS,
    next_tokens=NO_INTS,
    drafts=None,
)
