"""Loads experts that a checkpoint stores as one tensor for all experts of a layer.

Experts that are stored in this way are never converted to int8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.layers.local_experts import GroupedProduct
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.model_spec import ExpertSpec


def load_stacked_products(
    slices: WeightSlices,
    experts: ExpertSpec,
    hidden: int,
    prefix: str,
    here: Sequence[int],
    share: tuple[int, int],
) -> tuple[GroupedProduct, GroupedProduct]:
    """Return two products for the experts in ``here``: one for gate and up, and one for down.

    Args:
        prefix: beginning of the weights' names, such as ``model.layers.3.mlp.experts``.
        share: this rank's range [start, stop) of each expert's inner width.
    """
    count, width, (start, stop) = experts.num_experts, experts.width, share

    def stack(name: str, shape: tuple[int, ...], dim: int, first: int, last: int) -> Tensor:
        return slices.stack(f"{prefix}.{name}", (count, *shape), here, dim, first, last)

    # The columns of gate and up alternate, so all columns for a part of the inner width are
    # neighbours.
    gate_up = stack("gate_up_proj", (hidden, 2 * width), 1, 2 * start, 2 * stop)
    down = stack("down_proj", (width, hidden), 0, start, stop)
    if not experts.has_product_biases:
        return GroupedProduct(slices.place(gate_up)), GroupedProduct(slices.place(down))
    gate_up_bias = stack("gate_up_proj_bias", (2 * width,), 0, 2 * start, 2 * stop)
    down_bias = stack("down_proj_bias", (hidden,), 0, 0, hidden)
    if stop - start < width and slices.group.rank > 0:
        down_bias.zero_()  # only one of the ranks that share an expert adds the bias
    return (
        GroupedProduct(slices.place(gate_up), slices.place(_bias(gate_up_bias))),
        GroupedProduct(slices.place(down), slices.place(_bias(down_bias))),
    )


def load_joined_products(
    slices: WeightSlices,
    experts: ExpertSpec,
    hidden: int,
    prefix: str,
    here: Sequence[int],
    share: tuple[int, int],
) -> tuple[GroupedProduct, GroupedProduct]:
    """Return two products for the experts in ``here``: one for gate and up, and one for down. The
    checkpoint stores the weights as [experts, out, in]; or possibly as [experts, in, out], if
    ``joined_is_transposed`` is true.

    The products have no biases. In the stored tensor, all rows of gate come before the rows of up.

    Raises:
        ConfigError: the deployment converts matrices to int8.
    """
    count, width, (start, stop) = experts.num_experts, experts.width, share
    # The stored shape decides, because transformers 5 saves [experts, out, in] for all model
    # families.
    stored = slices.checkpoint.shape_of(f"{prefix}.gate_up_proj")
    transposed = experts.joined_is_transposed and stored == (count, hidden, 2 * width)
    if slices.checkpoint.quantises:
        raise ConfigError(
            f"quantization is w8a8; {prefix} is stored as one tensor for all experts, which cannot "
            "be converted to int8: leave quantization out"
        )
    # The parts of the last ranks can be beyond the stored rows; such parts are filled with zeros.
    last = max(start, min(stop, width))

    def read(name: str, outs: int, ins: int, dim: int, first: int, end: int) -> Tensor:
        """Return the range [first, end) of the dimension ``dim`` of [out, in] matrices, transposed
        to [experts, in, out].
        """
        if transposed:
            shape = count, ins, outs
            return slices.stack(f"{prefix}.{name}", shape, here, 1 - dim, first, end)
        shape = count, outs, ins
        found = slices.stack(f"{prefix}.{name}", shape, here, dim, first, end, has_blocks=True)
        return found.transpose(1, 2)

    def columns(first: int) -> Tensor:
        found = read("gate_up_proj", 2 * width, hidden, 0, first + start, first + last)
        return pad(found, (0, stop - last))

    gate_up = torch.cat([columns(0), columns(width)], 2)
    down = read("down_proj", hidden, width, 1, start, stop)
    return GroupedProduct(slices.place(gate_up)), GroupedProduct(slices.place(down))


def _bias(bias: Tensor) -> Tensor:
    """Convert a bias, which has the type of the weights, to the type that the operator requires for
    biases.
    """
    return bias.float() if bias.dtype == torch.bfloat16 else bias
