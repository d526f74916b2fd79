"""One rank's slices of a checkpoint with Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.linear import Linear, RowParallelLinear
from dist_aclgraph.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class WeightSlices:
    """Cuts one rank's weights out of a checkpoint and puts them on its device.

    Attributes:
        group: tensor parallel ranks among which weights are split.
        experts: how whole experts are divided among ranks, and run.
    """

    checkpoint: Checkpoint
    group: CommGroup
    device: torch.device
    experts: ExpertSetup

    def whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.checkpoint.read(name, shape).to(self.device)

    def part(self, name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor:
        """Return ``[start, stop)`` of ``dim``, on the host; beyond the tensor's end is zero."""
        return self.checkpoint.read_part(name, shape, dim, start, stop)

    def columns(self, name: str, out: int, width: int, start: int, stop: int) -> Tensor:
        """Output features [start, stop) of an [out, in] weight, transposed, on the host."""
        return self.part(name, (out, width), 0, start, stop).t()

    def place(self, weight: Tensor) -> Tensor:
        return weight.contiguous().to(self.device)

    def share(self, width: int) -> tuple[int, int]:
        """This rank's part of an inner width.

        Zero columns pad a width that the group does not divide: silu(0) * 0 = 0.
        """
        part = -(-width // self.group.size)
        return self.group.rank * part, (self.group.rank + 1) * part

    def fused(self, parts: list[tuple[str, int, int, int]], width: int, has_bias: bool) -> Linear:
        """One product for several: of each (name, out features, start, stop), side by side.

        Args:
            width: input features of all.
        """
        weights = [self.columns(f"{n}.weight", out, width, a, b) for n, out, a, b in parts]
        bias = None
        if has_bias:
            biases = [self.part(f"{n}.bias", (out,), 0, a, b) for n, out, a, b in parts]
            bias = torch.cat(biases).to(self.device)
        return Linear(self.place(torch.cat(weights, dim=1)), bias)

    def row_parallel(
        self, name: str, shape: tuple[int, int], start: int, stop: int, has_bias: bool
    ) -> RowParallelLinear:
        """Input features [start, stop) of a [out, in] weight of this shape."""
        part = self.part(f"{name}.weight", shape, 1, start, stop)
        bias = self.whole(f"{name}.bias", shape[:1]) if has_bias else None
        return RowParallelLinear(self.place(part.t()), bias, self.group)
