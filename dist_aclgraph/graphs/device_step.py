"""The inputs of a step on the device, for full graphs, piecewise graphs and eager steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class DraftInputs(NamedTuple):
    """The places from which drafting continues: the tokens of a step after which it samples.

    Attributes:
        rows: [num_reqs] int32, rows of the requests. Padding requests have the spare row, whose
            values are not used.
        most: [num_reqs] int32, for each request, the maximum number of accepted drafts, from 0 to
            k.
        positions: [num_reqs, k + 1] int32, positions of the places.
        slots: [num_reqs, 3 k] int32, slots of 3 k consecutive positions, which begin at the
            position of the request's first place; -1 is padding.
        places: [num_reqs * (k + 1)] int32, indices of the places among the step's tokens. If a
            request has fewer than k + 1 places, its last place is repeated.
        behind: [num_reqs] int32, for each request, the row whose number of accepted drafts the
            device adds to the request's positions; None outside of graphs. The number is from the
            row's last step. If the host already knows the positions, the row is the spare row,
            whose number is 0.
    """

    rows: Tensor
    most: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    behind: Tensor | None = None


class SharedPlaces(NamedTuple):
    """The prefill rank that runs each place, in a step whose prompts are split. A place is a token
    of the step after which a token is sampled.

    Attributes:
        owners: [num_places] int32, the rank that runs each place; padding places are included.
        landings: [num_places] int32, without padding places. For each place, the index of its token
            in this rank's list of tokens. If another rank runs the token, the element is the number
            of this rank's tokens, padding included. This number is not the index of any token.
    """

    owners: Tensor
    landings: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """The inputs of a step on the device, all int32.

    If ``HostStep`` has an attribute with the same name, the attribute here has the same contents,
    followed by padding.

    Attributes:
        token_ids, positions, slots: [num_tokens], padding included.
        block_table: [num_reqs, num_blocks]; the table has rows of padding requests only in graphs.
        places: indices of the tokens whose logits are needed. In graphs that verify drafts, all
            tokens are places, and the shape is [num_tokens]. In other graphs, the shape is
            [num_reqs], padding included. Outside of graphs, only live requests have places, and the
            shape is [num_samples * (k + 1)].
        drafts: the places from which drafting continues, padding included; None if the step
            verifies no drafts.
        next_tokens: [num_tokens + 1], for each of the step's tokens, the token that follows in the
            request. Padding and one spare element are included. None in graphs, or if the
            deployment uses no drafts.
        draft_table: [num_samples, num_blocks], block table of the live sampled requests. None in
            graphs, or if the deployment uses no drafts.
        shared: the rank that runs each of ``places``, if prompts are split between ranks; otherwise
            None.
        state_slots: [num_reqs], first state slot of each request's row (see ``StateSlots``), 0 for
            padding. Set only in graphs of a model with recurrent state.
        query_ends, kv_lens: [num_reqs], as ``pad_mixed`` returns them. Set only in full graphs of
            mixed batches whose attention reads lengths on the device.
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
