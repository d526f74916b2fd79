"""The stream budget formulas of vllm-ascend 0.11 to 0.20, reproduced exactly.

Source: ``vllm_ascend/utils.py::update_aclgraph_sizes``, which commit 5f2ef5a0b2 removed. For any
real device, all four formulas assume 2048 streams, of which 248 stay free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dist_aclgraph.planning.buckets import stepped_sizes, trim_sizes

Variant = Literal["v0.11", "v0.13", "v0.20", "last"]

DEVICE_STREAMS = 2048
RESERVED_STREAMS = 248
LEGACY_STREAMS = DEVICE_STREAMS - RESERVED_STREAMS
# number of streams that are subtracted if PCP is used, and once more if DCP is used
CONTEXT_PARALLEL_STREAMS = 100
# If HCCL does not use AIV, this number of streams is subtracted if TP is used, and once more if DP
# is used.
GROUP_STREAMS = 40


@dataclass(frozen=True, kw_only=True)
class LegacyInputs:
    """All inputs of the formulas of earlier vllm-ascend releases, and some values that no formula
    uses.

    Attributes:
        num_hidden_layers: number of layers of the main model.
        moe: whether the model has experts.
        tp, dp, pcp, dcp: parallel sizes.
        ep: whether expert parallelism is on; the formulas do not depend on the number of its ranks.
        aiv: whether HCCL expands collectives on vector cores (``HCCL_OP_EXPANSION_MODE=AIV``).
        multistream_shared: whether shared experts run on a separate stream.
        draft_layers: number of layers of the draft model; 0 means that there is no draft model.
        sizes: the sizes that may be captured, in ascending order; None means the stepped sizes up
            to ``max_size``.
        device: chip generation; no formula depends on it.
    """

    num_hidden_layers: int
    moe: bool = False
    tp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: bool = False
    aiv: bool = False
    multistream_shared: bool = False
    draft_layers: int = 0
    num_speculative_tokens: int = 0
    max_num_seqs: int = 256
    cudagraph_mode: str = "PIECEWISE"
    sizes: Sequence[int] | None = None
    max_size: int = 512
    device: str = "A2"

    @property
    def candidate_sizes(self) -> list[int]:
        return list(stepped_sizes(self.max_size) if self.sizes is None else self.sizes)

    @property
    def num_graphs(self) -> int:
        """Number of piecewise graphs of one bucket: each of the two models, the main model and the
        draft model, has one graph more than it has layers.
        """
        graphs = self.num_hidden_layers + 1
        return graphs + self.draft_layers + 1 if self.draft_layers else graphs

    @property
    def num_groups(self) -> int:
        """Number of communication groups that the formulas count. The formulas count only TP and
        DP.
        """
        return (self.dp > 1) + (self.tp > 1)

    @property
    def streams_per_graph(self) -> int:
        if not self.aiv:
            return 1 + 2 * self.num_groups
        streams = 1 + self.num_groups + int(self.ep) + int(self.multistream_shared)
        return streams + int(self.moe and self.dp > 1)


def max_buckets(inputs: LegacyInputs, variant: Variant) -> int:
    """Return how many buckets the formula allows; zero or less if it allows none."""
    left = LEGACY_STREAMS
    if variant == "last" and inputs.cudagraph_mode == "FULL_AND_PIECEWISE":
        left = max(0, left - len(inputs.candidate_sizes))
    if inputs.aiv:
        if not inputs.moe:
            left -= inputs.streams_per_graph * inputs.num_graphs
        # As in vllm-ascend, the code divides twice. A single division by the product could be
        # rounded to another result.
        return math.floor(left / inputs.num_graphs / inputs.streams_per_graph)
    if variant != "v0.11":
        left -= CONTEXT_PARALLEL_STREAMS * ((inputs.pcp > 1) + (inputs.dcp > 1))
    left -= GROUP_STREAMS * inputs.num_groups
    return math.floor(left / inputs.num_graphs / inputs.streams_per_graph)


def legacy_sizes(inputs: LegacyInputs, variant: Variant) -> list[int]:
    """Return the sizes that this version of vllm-ascend would have captured, in ascending order."""
    limit = max_buckets(inputs, variant)
    if variant != "v0.11":
        return trim_sizes(inputs.candidate_sizes, limit)
    # Version 0.11 chose sizes by their index in a descending list. Later versions use an ascending
    # list. If an index is n + 0.5, the two lists can lead to different sizes.
    sizes = trim_sizes(inputs.candidate_sizes[::-1], limit)[::-1]
    if limit <= 1:
        sizes = inputs.candidate_sizes[-1:]
    query_len = inputs.num_speculative_tokens + 1
    if query_len > 2 and sizes[-1] < query_len * inputs.max_num_seqs:
        sizes = [size * query_len for size in sizes]
    return sizes
