"""The gated delta rule (arXiv 2412.06464). For bfloat16, CANN's operators compute the rule. For
other types, and for decays that differ between channels, plain operators compute the rule.

For each token and value head, with the state S [value_dim, key_dim]:

    S = S exp(g);  S = S + beta (v - S k) k';  out = S q / sqrt(key_dim)

Several neighbouring value heads share a key head. The decay g is one number for each head. In Kimi
Delta Attention (arXiv 2510.26692), g has one number for each channel of the head's key. A channel
is a column of S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.layers.state_metadata import DirectStates, PromptStates, store

CHUNK_TOKENS = 64  # number of tokens whose updates are computed together; a power of two
# maximum number of tokens of one pass; larger passes need fewer launches, but more memory
PASS_TOKENS = 1024


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the rule for the tokens of direct requests (see ``StateSteps.of_step``), or for
    the tokens of prompts.

    Attributes:
        q, k: [n, num_key_heads, key_dim]; each row has the Euclidean norm 1.
        v: [n, num_value_heads, value_dim].
        g: [n, num_value_heads] or [n, num_value_heads, key_dim] float32, the logarithm of the
            decay, which is at most 0.
        beta: [n, num_value_heads], step size of the update, from 0 to 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


class DeltaRule(Protocol):
    """Runs the rule. Both methods return the results [n, num_value_heads, value_dim].

    Attributes:
        state_dtype: type of the states.
    """

    state_dtype: torch.dtype

    def direct(self, inputs: DeltaInputs, states: Tensor, at: DirectStates) -> Tensor:
        """Return the results of direct requests, and update their states in place. This computation
        can be captured in a graph.

        Args:
            states: [num_slots, num_value_heads, value_dim, key_dim].
        """

    def prompts(
        self, inputs: DeltaInputs, states: Tensor, at: PromptStates
    ) -> tuple[Tensor, Tensor]:
        """Return the results of prompts, and the states after their last tokens.

        Args:
            states: [num_reqs, num_value_heads, value_dim, key_dim], the states before the prompts'
                first tokens. This tensor stays unchanged.
        """


class FusedDeltaRule:
    """Runs CANN's operators. Inputs, results and states are bfloat16; only ``g`` is float32.

    ``g`` must have one number for each head, because torch_npu 2.13 does not support one decay for
    each channel. torch_npu's documentation of the operator for direct requests says that ``gk``,
    the argument for such decays, is not supported yet. The operator for prompts has no such
    argument.
    """

    state_dtype = torch.bfloat16

    def direct(self, inputs: DeltaInputs, states: Tensor, at: DirectStates) -> Tensor:
        found: Tensor = torch.ops.npu.npu_recurrent_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            states,
            beta=inputs.beta,
            scale=inputs.scale,
            actual_seq_lengths=at.layout.lengths,
            ssm_state_indices=at.slots,
            num_accepted_tokens=at.accepted,
            g=inputs.g,
        )
        return found

    def prompts(
        self, inputs: DeltaInputs, states: Tensor, at: PromptStates
    ) -> tuple[Tensor, Tensor]:
        found, last = torch.ops.npu.npu_chunk_gated_delta_rule(
            inputs.q,
            inputs.k,
            inputs.v,
            beta=inputs.beta,
            initial_state=states,
            actual_seq_lengths=at.lengths,
            scale=inputs.scale,
            g=inputs.g,
        )
        return found, last


class PlainDeltaRule:
    """Computes with plain operators in float32. ``g`` has one number for each head or channel.

    This class is used for types other than bfloat16, because CANN's operators return only bfloat16.
    This class is also used for decays that differ between channels.
    """

    state_dtype = torch.float32

    def direct(self, inputs: DeltaInputs, states: Tensor, at: DirectStates) -> Tensor:
        q, k, v, g, beta = _in_float32(inputs)
        n, layout = at.num_tokens, at.layout
        decay, beta = g.exp()[..., None, :], beta[..., None]
        out = v.new_empty(n + 1, *v.shape[1:])
        state = states.index_select(0, at.sources)
        for i in range(layout.max_tokens):
            # If a request has fewer than ``max_tokens`` tokens, its last token is computed again.
            # These results are written to slot 0 and to the last row of ``out``, and are not used.
            is_live = layout.lengths > i
            token = (layout.starts + i).clamp(max=n - 1)
            key = k.index_select(0, token)[..., None]  # [num_reqs, heads, key_dim, 1]
            state = state * decay.index_select(0, token)
            error = v.index_select(0, token) - (state @ key)[..., 0]
            change = error * beta.index_select(0, token)
            state = state + change[..., None] @ key.mT
            found = (state @ q.index_select(0, token)[..., None])[..., 0]
            store(out, torch.where(is_live, token, n), found)
            slots = at.slots.index_select(0, token)
            store(states, slots.masked_fill(~is_live, 0), state)
        return out[:n].to(inputs.v.dtype)

    def prompts(
        self, inputs: DeltaInputs, states: Tensor, at: PromptStates
    ) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(0, 1) for x in _in_float32(inputs)]  # heads are the first axis
        outs, last, start = [], [], 0
        for state, end in zip(states, at.ends, strict=True):
            out, state = _run_part(state, *(x[:, start:end] for x in rows))
            outs.append(out)
            last.append(state)
            start = end
        return torch.cat(outs, 1).transpose(0, 1).to(inputs.v.dtype), torch.stack(last)


def rule_for(dtype: torch.dtype, *, decays_by_channel: bool) -> DeltaRule:
    """Return the object that runs the rule for activations of the type ``dtype``."""
    is_fused = dtype == torch.bfloat16 and not decays_by_channel
    return FusedDeltaRule() if is_fused else PlainDeltaRule()


def _in_float32(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """Return q, k, v, g and beta in float32, with one row for each value head. q is multiplied by
    ``inputs.scale``, and g has the shape [n, heads, 1 or key_dim].
    """
    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    g = inputs.g if inputs.g.dim() == 3 else inputs.g[..., None]
    return q * inputs.scale, k, inputs.v.float(), g, inputs.beta.float()


def _run_part(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over one part of a prompt.

    Args:
        state: [heads, value_dim, key_dim].
        q, k, v: [heads, n, dim].
        g: [heads, n, 1 or key_dim].
        beta: [heads, n].

    Returns:
        The results, [heads, n, value_dim], and the state after the last token.
    """
    outs = []
    for start in range(0, q.shape[1], PASS_TOKENS):
        rows = slice(start, start + PASS_TOKENS)
        out, state = _run_chunks(state, *(x[:, rows] for x in (q, k, v, g, beta[..., None])))
        outs.append(out)
    return torch.cat(outs, 1), state


def _run_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over at most ``PASS_TOKENS`` tokens, chunk by chunk; see ``_run_part``.

    Each token changes the state. Within a chunk, a token's change depends on the changes of earlier
    tokens. A triangular system of equations describes all changes of a chunk. Its solution is
    linear in the state before the chunk. Only the states between chunks must be computed one by
    one; all other values are computed for all chunks at once.

    Args:
        beta: [heads, n, 1].
    """
    n = q.shape[1]
    size = min(CHUNK_TOKENS, 1 << (n - 1).bit_length())
    # The inputs are padded with zeros after the last token. Zeros leave the state unchanged.
    padding = (0, 0, 0, -n % size)
    q, k, v, g, beta = (torch.unflatten(pad(x, padding), 1, (-1, size)) for x in (q, k, v, g, beta))
    # [heads, chunks, size, 1 or key_dim], logarithms of the decays since the chunk's start
    sums = g.cumsum(2)
    weighted = k * beta
    system = _inverse_of_unit_triangle(_decayed_products(weighted, k, sums).tril(-1))
    own = _decayed_products(q, k, sums)
    changes = system @ (v * beta)  # the changes if the state before the chunk is zero
    reads = system @ (weighted * sums.exp())
    queries, end = q * sums.exp(), sums[:, :, -1:]
    keys, kept = k * (end - sums).exp(), end.exp()
    outs = []
    for i in range(q.shape[1]):
        change = changes[:, i] - reads[:, i] @ state.mT
        outs.append(queries[:, i] @ state.mT + own[:, i] @ change)
        state = state * kept[:, i] + change.mT @ keys[:, i]
    return torch.cat(outs, 1)[:, :n], state


def _decayed_products(x: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """Return the products of x[i] and k[j] for all tokens j <= i, multiplied by the decay from
    token j to token i.

    Args:
        x, k: [heads, chunks, size, key_dim].
        sums: [heads, chunks, size, 1 or key_dim], logarithms of the decays since the chunk's start.

    Returns:
        [heads, chunks, size, size], zero for j > i.
    """
    if sums.shape[-1] == 1:
        is_later = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).triu(1)
        return (x @ k.mT) * (sums - sums.mT).masked_fill(is_later, -torch.inf).exp()
    # Each channel has its own decay, so x and k are multiplied by decays before their product is
    # computed. In each block of tokens, the rows of x come from the second half, and the rows of k
    # from the first half. Decays are computed relative to the end of the first half. All exponents
    # are at most 0, and nothing overflows.
    found = (x * k).sum(-1)[..., None, None]  # [heads, chunks, blocks, rows, rows]
    while (rows := found.shape[-1]) < x.shape[2]:
        halves = (torch.unflatten(t, 2, (-1, 2, rows)).unbind(3) for t in (x, k, sums))
        (_, later), (earlier, _), (until, since) = halves
        middle = until[..., -1:, :]
        corner = (later * (since - middle).exp()) @ (earlier * (middle - until).exp()).mT
        first, second = torch.unflatten(found, 2, (-1, 2)).unbind(3)
        found = _below(first, corner, second)
    return found[:, :, 0]


def _inverse_of_unit_triangle(below: Tensor) -> Tensor:
    """Return the inverse of I + ``below``; ``below`` [heads, chunks, n, n] has non-zero elements
    only below the diagonal, and n is a power of two.

    The function inverts square blocks on the diagonal. Their size is first 1, then 2, 4 and so on
    up to n.
    """
    n = below.shape[-1]
    found = below.new_ones(*below.shape[:2], n, 1, 1)  # [heads, chunks, blocks, rows, rows]
    while (rows := found.shape[-1]) < n:
        first, second = torch.unflatten(found, 2, (-1, 2)).unbind(3)
        count = n // (2 * rows)
        blocks = below.reshape(*below.shape[:2], count, 2, rows, count, 2, rows)
        # [heads, chunks, count, rows, count, rows]: the lower left quarters of all blocks
        quarters = blocks[:, :, :, 1, :, :, 0]
        corner = quarters.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
        found = _below(first, -(second @ corner @ first), second)
    return found[:, :, 0]


def _below(first: Tensor, corner: Tensor, second: Tensor) -> Tensor:
    """Return the matrix [..., 2 n, 2 n] with the triangles ``first`` and ``second`` on the
    diagonal, and ``corner`` below the diagonal.
    """
    above = torch.cat([first, torch.zeros_like(first)], -1)
    return torch.cat([above, torch.cat([corner, second], -1)], -2)
