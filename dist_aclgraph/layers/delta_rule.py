"""The gated delta rule (arXiv 2412.06464): CANN's operators for bfloat16, and the same rule
composed of plain operators for other types.

For each token and value head, with the state S [value_dim, key_dim]:

    S = exp(g) S;  S = S + beta (v - S k) k';  out = S q / sqrt(key_dim)

Neighbouring value heads share a key head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dist_aclgraph.layers.state_metadata import DirectStates, PromptStates, store

CHUNK_TOKENS = 64  # tokens of a prompt whose updates are computed together; a power of two


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the rule for the tokens of direct requests, or of prompts.

    Attributes:
        q, k: [n, num_key_heads, key_dim], rows of length one.
        v: [n, num_value_heads, value_dim].
        g: [n, num_value_heads] float32, logarithm of the decay, at most 0.
        beta: [n, num_value_heads], 0 to 1.
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
        """Update the states of direct requests in place. A graph may contain this computation.

        Args:
            states: [num_slots, num_value_heads, value_dim, key_dim].
        """

    def prompts(
        self, inputs: DeltaInputs, states: Tensor, at: PromptStates
    ) -> tuple[Tensor, Tensor]:
        """Return the results, and the states after the last tokens.

        Args:
            states: [num_reqs, num_value_heads, value_dim, key_dim], stays unchanged.
        """


class FusedDeltaRule:
    """CANN's operators. All inputs, results and states are bfloat16, except ``g``."""

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
    """Plain operators in float32. CANN's operators return bfloat16 only."""

    state_dtype = torch.float32

    def direct(self, inputs: DeltaInputs, states: Tensor, at: DirectStates) -> Tensor:
        q, k, v, g, beta = _in_float32(inputs)
        n, layout = at.num_tokens, at.layout
        decay, beta = g.exp()[..., None, None], beta[..., None]
        out = v.new_empty(n + 1, *v.shape[1:])
        state = states.index_select(0, at.sources)
        for i in range(layout.max_tokens):
            # A request with fewer tokens repeats a token, in slot 0 and in the last row of ``out``.
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
        rows = [x.transpose(0, 1) for x in _in_float32(inputs)]  # heads first
        outs, last, start = [], [], 0
        for state, end in zip(states, at.ends, strict=True):
            out, state = _run_chunks(state, *(x[:, start:end] for x in rows))
            outs.append(out)
            last.append(state)
            start = end
        return torch.cat(outs, 1).transpose(0, 1).to(inputs.v.dtype), torch.stack(last)


def rule_for(dtype: torch.dtype) -> DeltaRule:
    """Return the rule for activations of this type."""
    return FusedDeltaRule() if dtype == torch.bfloat16 else PlainDeltaRule()


def _in_float32(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """Return q, k, v, g and beta for each value head; q is scaled."""
    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    return q * inputs.scale, k, inputs.v.float(), inputs.g, inputs.beta.float()


def _run_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over one part of a prompt, chunk by chunk.

    Within a chunk, the change that each token makes to the state depends on the changes of the
    tokens before it. A triangular system describes all changes of the chunk; its solution is linear
    in the state before the chunk.

    Args:
        state: [heads, value_dim, key_dim].
        q, k, v: [heads, n, dim].
        g, beta: [heads, n].

    Returns:
        [heads, n, value_dim], and the state after the last token.
    """
    outs = []
    for start in range(0, q.shape[1], CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        out, state = _run_chunk(state, *(x[:, rows] for x in (q, k, v, g, beta)))
        outs.append(out)
    return torch.cat(outs, 1), state


def _run_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the rule over at most ``CHUNK_TOKENS`` tokens; see ``_run_chunks``."""
    sums = g.cumsum(-1)[..., None]  # [heads, n, 1], logarithms of decays
    is_later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    decay = (sums - sums.mT).masked_fill(is_later, -torch.inf).exp()  # from token j to token i
    weighted = k * beta[..., None]
    system = _inverse_of_unit_triangle(((weighted @ k.mT) * decay).tril(-1))
    changes = system @ (v * beta[..., None] - (weighted * sums.exp()) @ state.mT)
    out = (q * sums.exp()) @ state.mT + ((q @ k.mT) * decay) @ changes
    end = sums[:, -1:]
    state = state * end.exp() + changes.mT @ (k * (end - sums).exp())
    return out, state


def _inverse_of_unit_triangle(below: Tensor) -> Tensor:
    """Return the inverse of I + ``below``; ``below`` [heads, n, n] has non-zero elements only below
    the diagonal.

    Blocks on the diagonal are inverted, first of one row, then of twice as many rows each time.
    """
    heads, n, _ = below.shape
    size = 1 << (n - 1).bit_length()
    below = torch.nn.functional.pad(below, (0, size - n, 0, size - n))
    found = below.new_ones(heads, size, 1, 1)  # [heads, blocks, rows, rows]
    rows = 1
    while rows < size:
        first, second = found.view(heads, -1, 2, rows, rows).unbind(2)
        blocks = below.view(heads, size // (2 * rows), 2, rows, size // (2 * rows), 2, rows)
        corner = blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        corner = -(second @ corner @ first)
        above = torch.cat([first, torch.zeros_like(first)], -1)
        found = torch.cat([above, torch.cat([corner, second], -1)], -2)
        rows *= 2
    return found[:, 0, :n, :n]
