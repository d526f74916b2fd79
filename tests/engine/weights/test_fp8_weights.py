"""Weights in FP8 are compared with the published formula: values times scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dist_aclgraph.errors import MissingTensorError
from dist_aclgraph.models.checkpoint import Checkpoint

BLOCK = 128
SHAPE = (300, 200)  # no dimension is a multiple of BLOCK
LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Largest relative error. The mantissa has three bits, and rounding changes the mantissa by at most
# half of the third bit.
ERROR = 2**-4


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[place].abs().max() / LARGEST
            values[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    # The blocks have values of very different size, so that another block's scale would give a
    # large error.
    return torch.randn(SHAPE) * torch.logspace(-3, 1, SHAPE[0]).unsqueeze(1)


@pytest.fixture
def checkpoint(tmp_path: Path, weight: Tensor) -> Checkpoint:
    values, scales = quantise(weight)
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    return Checkpoint(tmp_path, torch.float32)


def test_the_whole_is_within_half_a_bit_of_its_reference(
    checkpoint: Checkpoint, weight: Tensor
) -> None:
    read = checkpoint.read("w", SHAPE)

    # Values below the block's smallest normal FP8 number have a limited absolute error. Their
    # relative error has no limit.
    smallest = torch.finfo(torch.float8_e4m3fn).smallest_normal / LARGEST * weight.abs().max()
    assert ((read - weight).abs() <= ERROR * weight.abs() + ERROR * smallest).all()
    assert not torch.equal(read, weight)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_have_the_scales_of_their_places(checkpoint: Checkpoint, dim: int) -> None:
    whole = checkpoint.read("w", SHAPE)

    for start in (0, 37, 128, 150):
        part = checkpoint.read_part("w", SHAPE, dim, start, start + 40)
        assert torch.equal(part, whole.narrow(dim, start, 40))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.bfloat16, torch.float16])
def test_scales_may_be_stored_in_any_type(
    tmp_path: Path, weight: Tensor, dtype: torch.dtype
) -> None:
    values, scales = quantise(weight)
    stored = scales.to(dtype)
    save_file({"w": values, "w_scale_inv": stored}, tmp_path / "model.safetensors")

    read = Checkpoint(tmp_path, torch.float32).read("w", SHAPE)

    each = stored.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(read, values.float() * each[: SHAPE[0], : SHAPE[1]])


def test_missing_scales_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(SHAPE).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")

    with pytest.raises(MissingTensorError, match="w_scale_inv"):
        Checkpoint(tmp_path, torch.float32).read("w", SHAPE)
