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
    """What one step runs on one rank, in batch order; ``DeviceStep`` has the same names.

    Nobody writes to the arrays: what a step has in common with the one before may be the same
    array, and who has a copy of it need not look again.

    Attributes:
        rows: [num_reqs], row of each request.
        token_ids, positions, slots: [num_tokens]; a token that only the device knows is a reference
            (``references.py``), and one without a block of its row is written to the dummy.
        query_ends, kv_lens: [num_reqs], cumulative query lengths and KV lengths.
        block_table: [num_reqs, num_blocks], as wide as the longest request and its drafts need.
        sampled: [num_samples], indices into the batch of the requests that get tokens;
            sampled_rows: their rows.
        num_logits: [num_samples], how many places of each are sampled.
        places: [num_samples * (k + 1)], indices into the tokens of what is sampled; the last one of
            a request is repeated where it has fewer.
        next_tokens: [num_tokens], the token after each where the host knows it; empty without
            drafts.
        drafts: where drafting goes on; None without drafts.
        prompts: what the other prefill ranks run, where prompts are split between them: then tokens
            and places are this rank's, requests still those of the whole step.
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
