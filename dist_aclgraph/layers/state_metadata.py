"""The states of linear attention, and the slots that the tokens of a step read and write.

The state of a request in one layer has two parts: the last inputs of the convolution, and a matrix
for each value head. All states have the same size. Each state is stored in a slot. A request uses
the same slot number in all layers. Slot 0 belongs to no request; padding reads and writes slot 0.

The tokens of a step are in this order: tokens of direct requests, prompt tokens, padding. In
shapes, n is the number of requests, t the number of tokens, and w the width of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray


@dataclass(frozen=True)
class StateCache:
    """The states of one layer on one rank.

    Attributes:
        conv: [num_slots, w - 1, channels], the last inputs of the convolution, in the order of
            their tokens.
        recurrent: [num_slots, num_value_heads, value_dim, key_dim], the matrices of the value
            heads.
    """

    conv: Tensor
    recurrent: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors, because all tensors of this cache consist of slots, not of blocks."""
        return ()

    @property
    def states(self) -> tuple[Tensor, ...]:
        return self.conv, self.recurrent


class DirectArrays(NamedTuple):
    """Arrays computed from the slots and lengths of direct requests; see ``DirectStates``."""

    slots: IntArray
    lengths: IntArray
    starts: IntArray
    windows: IntArray


@dataclass(frozen=True)
class DirectLayout:
    """Indices that depend only on the lengths of direct requests, so that they are constant in a
    graph.

    Attributes:
        lengths: [n] int32, number of tokens of each request, from 1 to ``MAX_DIRECT_TOKENS``.
        starts: [n] int32, for each request, the number of tokens of all requests before it.
        windows: [t, w] int32, for each token, the indices of the w rows that the convolution reads.
            The rows are in this order: one row for each token, then, for each request, the w - 1
            rows of its state before the step. The last of a token's w indices is the index of its
            own row.
        ones: [n] int32, all ones: the value of ``DirectStates.accepted`` in steps without drafts.
        max_tokens: an upper limit of ``lengths``.
    """

    lengths: Tensor
    starts: Tensor
    windows: Tensor
    ones: Tensor
    max_tokens: int

    @classmethod
    def of_graph(
        cls, num_reqs: int, query_len: int, width: int, device: torch.device
    ) -> DirectLayout:
        """Return the layout of ``num_reqs`` requests with ``query_len`` tokens each."""
        bases, lengths = np.zeros(num_reqs, np.int32), np.full(num_reqs, query_len, np.int32)
        _, *arrays = direct_arrays(bases, lengths, width)
        sent = [torch.from_numpy(array).to(device) for array in arrays]
        return cls.of_arrays(sent, query_len)

    @classmethod
    def of_arrays(cls, sent: Sequence[Tensor], max_tokens: int) -> DirectLayout:
        """Return the layout of requests whose lengths may differ.

        Args:
            sent: the fields of ``DirectArrays`` except the slots, as tensors on the device.
        """
        lengths, starts, windows = sent
        return cls(lengths, starts, windows, torch.ones_like(lengths), max_tokens)


@dataclass(frozen=True)
class DirectStates:
    """The slots of requests that update their states token by token.

    Each token has a slot, which receives the state after this token. So a rejected draft needs no
    repair: the state before the draft is still in the previous token's slot. Before the step, the
    slot of a request's token number ``accepted`` contains the request's state. Tokens are counted
    from 1.

    For example, the three tokens of a request with two drafts have the slots 4, 5 and 6, and one
    draft is accepted. Then the current state is in slot 5. In the next step, the tokens may have
    the slots 4, 5 and 6 with ``accepted`` 2, or 5, 4 and 6 with ``accepted`` 1. If the request has
    only one token in the next step, this token must have slot 5, and ``accepted`` must be 1.

    Attributes:
        slots: [t] int32, the slot of each token. All tokens of a padding request have slot 0. Two
            requests never have the same slot, except slot 0.
        accepted: [n] int32, for each request, the number of the token whose slot contains the
            request's state before the step. Tokens are counted from 1; padding has 1.
        sources: [n] int32, for each request, the slot with the state from which the request begins.
    """

    slots: Tensor
    accepted: Tensor
    sources: Tensor
    layout: DirectLayout

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]

    @classmethod
    def of_slots(cls, slots: Tensor, accepted: Tensor, layout: DirectLayout) -> DirectStates:
        """Return the states of requests whose slots need not be consecutive. The computation runs
        on the device, so it can be captured in a graph.
        """
        sources = slots.index_select(0, layout.starts + accepted - 1)
        return cls(slots, accepted, sources, layout)

    @classmethod
    def of_windows(cls, bases: Tensor, accepted: Tensor, layout: DirectLayout) -> DirectStates:
        """Return the states of requests that have ``layout.max_tokens`` tokens each and consecutive
        slots.

        The computation runs on the device, so it can be captured in a graph.

        Args:
            bases: [n] int32, the first slot of each request; 0 for padding.
        """
        offsets = torch.arange(layout.max_tokens, dtype=torch.int32, device=bases.device)
        first = bases[:, None]
        slots = (first + offsets).masked_fill(first == 0, 0)
        return cls.of_slots(slots.flatten(), accepted, layout)


class PromptArrays(NamedTuple):
    """Arrays computed from the slots and lengths of prompts; see ``PromptStates``."""

    lengths: IntArray
    sources: IntArray
    slots: IntArray
    goes_on: IntArray
    padded: IntArray
    outputs: IntArray
    tails: IntArray


@dataclass(frozen=True)
class PromptStates:
    """The slots of chunks of prompts. Chunks can have any length, and do not run in full graphs.

    Attributes:
        lengths: [n] int32, number of tokens of each chunk.
        sources: [n] int32, for each request, the slot with the state from which the request begins.
            The slot is not read if ``is_new`` is true for the request.
        slots: [n] int32, for each request, the slot that receives the state after the last token of
            its chunk. It may be the same slot as in ``sources``. Two requests never name the same
            slot.
        is_new: [n] bool, true for a request that has no state yet; such a request begins with a
            state of zeros.
        padded: [t + n * (w - 1)] int32, indices of rows. Rows 0 to t - 1 are the step's tokens. The
            next rows are states: for each request, w - 1 rows of the state from which it begins.
            For each request, ``padded`` contains the indices of the state's rows, followed by the
            indices of the tokens' rows.
        outputs: [t] int32, for each token, the index in ``padded`` of the first of the token's
            ``w`` inputs.
        tails: [n * (w - 1)] int32, indices in ``padded`` of the last w - 1 inputs of each request.
        ends: cumulative lengths of the chunks, on the host.
    """

    lengths: Tensor
    sources: Tensor
    slots: Tensor
    is_new: Tensor
    padded: Tensor
    outputs: Tensor
    tails: Tensor
    ends: list[int]

    @property
    def num_tokens(self) -> int:
        return self.ends[-1]

    @classmethod
    def of_step(cls, sent: Sequence[Tensor], ends: list[int]) -> PromptStates:
        """Return the states of one step's chunks of prompts.

        Args:
            sent: the fields of ``PromptArrays``, as tensors on the device.
        """
        lengths, sources, slots, goes_on, padded, outputs, tails = sent
        return cls(lengths, sources, slots, goes_on == 0, padded, outputs, tails, ends)


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """The state slots of a step. All layers of linear attention use the same object.

    Attributes:
        direct: the requests that update their states token by token; None if there are none.
        prompts: the chunks of prompts; None if the step has no prompt tokens.
    """

    direct: DirectStates | None = None
    prompts: PromptStates | None = None


def direct_arrays(bases: IntArray, lengths: IntArray, width: int) -> DirectArrays:
    """Return the arrays of direct requests, each of which has consecutive slots.

    Args:
        bases: [n] int32, the first slot of each request; 0 for padding.
        lengths: [n] int32, number of tokens of each request.
        width: width of the convolution.
    """
    request, position, starts = _places(lengths)
    slots = np.where(bases[request] == 0, 0, bases[request] + position)
    offset = position[:, None] + np.arange(1 - width, 1)
    before = len(request) + (request[:, None] + 1) * (width - 1) + offset
    windows = np.where(offset < 0, before, starts[request][:, None] + offset)
    return DirectArrays(*(x.astype(np.int32) for x in (slots, lengths, starts, windows)))


def prompt_arrays(
    sources: IntArray, slots: IntArray, lengths: IntArray, goes_on: IntArray, width: int
) -> PromptArrays:
    """Return the arrays of chunks of prompts.

    Args:
        sources, slots, lengths: [n] int32, see ``PromptStates``.
        goes_on: [n] int32, 1 if the request already has a state, otherwise 0.
        width: width of the convolution.
    """
    request, position, starts = _places(lengths)
    num_reqs, num_tokens, before = len(lengths), len(request), width - 1
    first = starts + np.arange(num_reqs) * before  # index in ``padded`` of each request's first row
    outputs = first[request] + position
    of_states = first[:, None] + np.arange(before)
    padded = np.empty(num_tokens + num_reqs * before, np.int32)
    padded[outputs + before] = np.arange(num_tokens)
    padded[of_states.ravel()] = num_tokens + np.arange(num_reqs * before)
    tails = (of_states + lengths[:, None]).ravel()
    arrays = (lengths, sources, slots, goes_on, padded, outputs, tails)
    return PromptArrays(*(x.astype(np.int32) for x in arrays))


def _places(lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return three arrays: the request of each token, the position of each token in its request,
    and for each request the number of tokens of all requests before it.
    """
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    request = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return request, np.arange(len(request), dtype=np.int32) - starts[request], starts


def store(states: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write row i of ``rows`` to slot ``slots[i]`` of ``states``, on the device."""
    torch.ops.npu.npu_scatter_nd_update_(states, slots.unsqueeze(1), rows)
