"""The inputs of a step on the device: of a graph, or of a step that runs in pieces or eagerly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class DraftInputs(NamedTuple):
    """The places from which drafting continues, for the sampled requests of a step.

    Attributes:
        rows: [num_reqs] int32, their rows; padding has the spare row, which is never read.
        most: [num_reqs] int32, number of drafts that may be accepted: k, or 0 without drafts.
        positions: [num_reqs, k + 1] int32, of the places.
        slots: [num_reqs, 3 k] int32, of the positions from the first place on; -1 is padding.
        places: [num_reqs * (k + 1)] int32, their indices into the tokens of the step; a request
            with fewer places repeats its last one.
        behind: [num_reqs] int32, in graphs: the row behind whose accepted drafts a request begins;
            the spare row if the host knows its begin.
    """

    rows: Tensor
    most: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    behind: Tensor | None = None


class SharedPlaces(NamedTuple):
    """The prefill rank that runs the token at each place of a split step.

    Attributes:
        owners: [num_places] int32, padding included.
        landings: [num_places] int32 of live requests, indices into this rank's tokens; if another
            rank runs it, the index behind the padded tokens.
    """

    owners: Tensor
    landings: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """The step on the device. Names and shapes are those of ``HostStep``, except for padding; all
    int32.

    Attributes:
        token_ids, positions, slots: [num_tokens], padding included.
        block_table: [num_reqs, num_blocks]; of a graph with its padding, else of live requests.
        places: tokens whose logits are needed: [num_reqs] of a graph with its padding (all tokens
            if every request verifies drafts), else [num_samples * (k + 1)] of live requests.
        drafts: the places from which drafting continues, padding included; None without drafts to
            verify.
        next_tokens: [num_tokens + 1], padding included, and a spare one; None in graphs, and
            without drafts.
        draft_table: [num_samples, num_blocks], of the live sampled requests; None likewise.
        shared: the owners of places, if prompts are split between ranks; else None.
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
