"""Linear attention with the gated delta rule, for the heads of one rank: a short convolution, then
the rule. Both the convolution and the rule keep a state for each request. The models compute the
projections before the convolution and after the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from dist_aclgraph.layers.delta_rule import DeltaInputs, DeltaRule
from dist_aclgraph.layers.state_metadata import (
    DirectStates,
    PromptStates,
    StateCache,
    StateMetadata,
    store,
)

UNIT_EPS = 1e-6  # added to the sum of squares of a query or key, before the square root


@dataclass(frozen=True)
class ShortConvolution:
    """A causal convolution of each channel over the last tokens of a request, followed by silu.

    The convolution is computed in float32. CANN has no operator for a convolution over four tokens,
    so several other operators compute it.

    Attributes:
        weight: [width, channels] float32; its last row is multiplied with the input of the token
            itself.
    """

    weight: Tensor

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def direct(self, x: Tensor, states: Tensor, at: DirectStates) -> Tensor:
        """Compute [n, channels] -> [n, channels] float32, and write the state after each token to
        the token's slot.

        Args:
            states: [num_slots, width - 1, channels].
        """
        before = states.index_select(0, at.sources).flatten(0, 1)
        windows = torch.cat([x, before]).index_select(0, at.layout.windows.flatten())
        windows = windows.view(at.num_tokens, self.width, -1)
        store(states, at.slots, windows[:, 1:].contiguous())
        return silu((windows.float() * self.weight).sum(1))

    def prompts(self, x: Tensor, states: Tensor, at: PromptStates) -> Tensor:
        """Compute [n, channels] -> [n, channels] float32, and write the state after the last token
        of each chunk.
        """
        before = _begin(states, at).flatten(0, 1)
        padded = torch.cat([x, before]).index_select(0, at.padded)
        count = padded.shape[0] - self.width + 1
        # A token's result is a sum over ``width`` inputs. Each pass of this loop adds one input to
        # every sum. A single pass for all inputs would need ``width`` times as much memory.
        total = padded[:count].float() * self.weight[0]
        for i in range(1, self.width):
            total = torch.addcmul(total, padded[i : i + count].float(), self.weight[i])
        last = padded.index_select(0, at.tails).view(len(at.ends), self.width - 1, -1)
        store(states, at.slots, last)
        return silu(total.index_select(0, at.outputs))


@dataclass(frozen=True)
class GatedDelta:
    """Linear attention of this rank's heads.

    Attributes:
        unit: [key_dim] float32, filled with ``key_dim ** -0.5``. An RMS norm with this weight
            returns rows with the Euclidean norm 1.
    """

    num_key_heads: int
    num_value_heads: int
    value_dim: int
    convolution: ShortConvolution
    unit: Tensor
    rule: DeltaRule

    @property
    def key_dim(self) -> int:
        return self.unit.shape[0]

    @property
    def num_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def __call__(
        self,
        qkv: Tensor,
        g: Tensor,
        beta: Tensor,
        out: Tensor,
        cache: StateCache,
        metadata: StateMetadata,
    ) -> None:
        """Update the states, and write the results to ``out``. The padding rows of ``out`` stay
        unchanged.

        Args:
            qkv: [n, num_channels], inputs of the convolution: first all q, then all k, then all v.
            g: float32, the logarithm of the decay; see ``DeltaInputs``.
            beta: [n, num_value_heads], step size of the update, from 0 to 1.
            out: [n, num_value_heads, value_dim].
        """
        start = 0
        if (direct := metadata.direct) is not None:
            rows = slice(0, direct.num_tokens)
            mixed = self.convolution.direct(qkv[rows], cache.conv, direct)
            inputs = self._inputs(mixed, g[rows], beta[rows])
            out[rows].copy_(self.rule.direct(inputs, cache.recurrent, direct))
            start = direct.num_tokens
        if (prompts := metadata.prompts) is not None:
            rows = slice(start, start + prompts.num_tokens)
            mixed = self.convolution.prompts(qkv[rows], cache.conv, prompts)
            inputs = self._inputs(mixed, g[rows], beta[rows])
            found, last = self.rule.prompts(inputs, _begin(cache.recurrent, prompts), prompts)
            store(cache.recurrent, prompts.slots, last)
            out[rows].copy_(found)

    def _inputs(self, mixed: Tensor, g: Tensor, beta: Tensor) -> DeltaInputs:
        """Return the inputs of the rule from the result of the convolution, [n, channels]."""
        n, heads, d = mixed.shape[0], 2 * self.num_key_heads, self.key_dim
        v = mixed[:, heads * d :].to(beta.dtype).view(n, self.num_value_heads, self.value_dim)
        rows = mixed[:, : heads * d].reshape(n, heads, d)
        # The published formula adds ``UNIT_EPS`` to the sum of ``d`` squares. The operator adds its
        # epsilon to the mean of the squares, so ``UNIT_EPS`` is divided by ``d``.
        rows = torch.ops.npu.npu_rms_norm(rows, self.unit, UNIT_EPS / d)[0].to(beta.dtype)
        q, k = rows.chunk(2, 1)
        return DeltaInputs(q, k, v, g, beta)


def _begin(states: Tensor, at: PromptStates) -> Tensor:
    """Return the states before the prompts' first tokens, [num_reqs, ...]. A new request's state is
    zero.
    """
    found = states.index_select(0, at.sources)
    return found.masked_fill(at.is_new.view(-1, *[1] * (found.dim() - 1)), 0)
