"""The inputs of a step on the host, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.steps.draft_places import DraftPlaces

if TYPE_CHECKING:
    from dist_aclgraph.steps.prompt_share import PromptShare


@dataclass(frozen=True)
class HostStep:
    """The work of one step on one rank, in the order of the batch. ``DeviceStep`` has attributes
    with the same names.

    The arrays are never modified. If a value does not change from one step to the next, both steps
    may contain the same array object. A copy of this array, e.g. on the device, then stays valid.

    Attributes:
        rows: [num_reqs], row of each request.
        token_ids, positions, slots: [num_tokens]. If only the device knows a token, ``token_ids``
            contains a reference to the token (``references.py``) instead of an id. If the row has
            no block for a token, the token's slot is in the dummy block.
        query_ends, kv_lens: [num_reqs], cumulative query lengths and KV lengths.
        block_table: [num_reqs, num_blocks], with enough columns for the longest request and its
            drafts.
        sampled: [num_samples], indices, in the batch, of the requests that get tokens.
        sampled_rows: [num_samples], rows of these requests.
        num_logits: [num_samples], for each of these requests, how many tokens the step samples.
        places: [num_samples * (k + 1)], indices among the step's tokens. The step samples a token
            after each of these tokens. If a request has fewer than k + 1 places, its last place is
            repeated.
        next_tokens: [num_tokens], for each of the step's tokens, the token after it; 0 if the host
            does not know that token. Empty if the deployment uses no drafts.
        drafts: the places from which drafting continues; None if the deployment uses no drafts.
        prompts: the facts that this rank must know about the tokens of other prefill ranks; None if
            prompts are not split. If prompts are split, this ``HostStep`` contains all requests of
            the step, but only the tokens of this rank.
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
