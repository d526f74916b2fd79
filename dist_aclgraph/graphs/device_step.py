"""The inputs of a step on the device: of a graph, or of a step that runs in pieces or eagerly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class DraftInputs(NamedTuple):
    """Where drafting goes on, for the requests that are sampled in a step.

    Attributes:
        rows: [num_reqs] int32, their rows; padding has the spare row, which nobody reads.
        most: [num_reqs] int32, how many drafts may pass: k, or 0 where none were run.
        positions: [num_reqs, k + 1] int32, of the places.
        slots: [num_reqs, 3 k] int32, of the positions from the first place on; -1 is padding.
        places: [num_reqs * (k + 1)] int32, their indices into the tokens of the step; the last one
            is repeated where a request has fewer.
        behind: [num_reqs] int32, in graphs: the row whose passed drafts a request begins behind;
            the spare row where it begins where the host says.
    """

    rows: Tensor
    most: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    behind: Tensor | None = None


class SharedPlaces(NamedTuple):
    """Which prefill rank runs the token at each place of a split step.

    Attributes:
        owners: [num_places] int32, padding included.
        landings: [num_places] int32 of live requests, indices into this rank's tokens; one past the
            padded tokens where another rank runs it.
    """

    owners: Tensor
    landings: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """Names are those of ``HostStep``, shapes too but for padding; all int32.

    Attributes:
        token_ids, positions, slots: [num_tokens], padding included.
        block_table: [num_reqs, num_blocks]; of a graph with its padding, else of live requests.
        places: which tokens' logits are wanted: [num_reqs] of a graph with its padding (all tokens
            where every request verifies drafts), else [num_samples * (k + 1)] of live requests.
        drafts: where drafting goes on, padding included; None where nothing is verified.
        next_tokens: [num_tokens + 1], padding included, and a spare one; None in graphs, and
            without drafts.
        draft_table: [num_samples, num_blocks], of the live requests that are sampled; None
            likewise.
        shared: where prompts are split between ranks, else None.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    places: Tensor
    drafts: DraftInputs | None = None
    next_tokens: Tensor | None = None
    draft_table: Tensor | None = None
    shared: SharedPlaces | None = None
