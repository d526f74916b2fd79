"""The inputs of a step on the device, for full graphs, piecewise graphs and eager steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class DraftInputs(NamedTuple):
    """The places from which drafting continues, for the sampled requests of a step.

    Attributes:
        rows: [num_reqs] int32, rows of the requests; padding has the spare row, whose values do not
            matter.
        most: [num_reqs] int32, largest number of drafts of a request that may be accepted, from 0
            to k.
        positions: [num_reqs, k + 1] int32, positions of the places.
        slots: [num_reqs, 3 k] int32, slots of 3 k consecutive positions, from the position of the
            first place on; -1 is padding.
        places: [num_reqs * (k + 1)] int32, indices of the places among the step's tokens; a request
            with fewer places repeats its last place.
        behind: [num_reqs] int32; None outside of graphs. To each request's positions, the device
            adds the number of accepted drafts of the row ``behind``. If the host knows the
            positions of a request, ``behind`` is the spare row.
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
        owners: [num_places] int32, the rank that runs each place's token, padding included.
        landings: [num_places] int32, which contains only places of live requests. For each place,
            the index of the place's token in this rank's list of tokens. If another rank runs the
            token, the index is the length of this list, padding included.
    """

    owners: Tensor
    landings: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """The inputs of a step on the device, all int32.

    Attributes with the names of ``HostStep``'s attributes have the same contents, and are only
    longer by padding.

    Attributes:
        token_ids, positions, slots: [num_tokens], padding included.
        block_table: [num_reqs, num_blocks]; padding is included only in graphs.
        places: indices of tokens whose logits are needed. In graphs, the shape is [num_reqs],
            padding included; if every request verifies drafts, all tokens are places. Outside of
            graphs, only live requests have places, and the shape is [num_samples * (k + 1)].
        drafts: the places from which drafting continues, padding included; None if the step
            verifies no drafts.
        next_tokens: [num_tokens + 1], the token after each of the step's tokens, padding and one
            spare element included; None in graphs, or if the model does not draft.
        draft_table: [num_samples, num_blocks], block table of the live sampled requests; None in
            graphs, or if the model does not draft.
        shared: the owners of places, if prompts are split between ranks; else None.
        state_slots: [num_reqs], base of each request's row in ``StateSlots``, 0 for padding; only
            in graphs of a model with recurrent state.
        query_ends, kv_lens: [num_reqs], as ``pad_mixed`` returns them; only in full graphs of mixed
            batches whose attention reads lengths on the device.
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
    state_slots: Tensor | None = None
    query_ends: Tensor | None = None
    kv_lens: Tensor | None = None
