"""Weights are loaded from a checkpoint to the device. The tests check the weights, and the memory
that loading uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dist_aclgraph.comm.groups import ONE_RANK, CommGroup, RankGroups
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.models.checkpoint import PIECE_BYTES, Checkpoint
from dist_aclgraph.models.loading import WeightSlices

OUT, IN = 3000, 1030  # so large that the weight is read in several pieces of unequal size


@pytest.fixture(scope="module")
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(OUT, IN)


@pytest.fixture(scope="module")
def directory(weight: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    tensors = {"float32.weight": weight, "bfloat16.weight": weight.bfloat16()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_slices(npu: Any, directory: Path, dtype: torch.dtype) -> WeightSlices:
    checkpoint = Checkpoint(directory, dtype, device=npu.device)
    setup = ExpertSetup(RankGroups(tp=CommGroup((0,), 0), ep=ONE_RANK.ep))
    return WeightSlices(checkpoint, CommGroup((0,), 0), npu.device, setup)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", [(0, 0, OUT), (0, 700, 2900), (1, 30, 900), (1, 900, IN)])
def test_columns_of_a_product_are_the_rows_that_are_stored(
    npu: Any,
    directory: Path,
    weight: Tensor,
    stored: str,
    dtype: torch.dtype,
    part: tuple[int, int, int],
) -> None:
    slices, (dim, start, stop) = make_slices(npu, directory, dtype), part

    product: Any = slices.product([slices.matrix(stored, (OUT, IN), dim, start, stop)] * 2)

    rows = weight.to(getattr(torch, stored)).to(dtype).narrow(dim, start, stop - start)
    assert product.weight.is_contiguous()
    assert torch.equal(product.weight.cpu(), torch.cat([rows.t()] * 2, 1))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("beyond", [1, 100])
def test_a_slice_beyond_the_end_of_a_matrix_is_zero(
    npu: Any, directory: Path, weight: Tensor, dim: int, beyond: int
) -> None:
    slices, end = make_slices(npu, directory, torch.float32), (OUT, IN)[dim]
    start, stop = end - 50, end + beyond

    product: Any = slices.product([slices.matrix("float32", (OUT, IN), dim, start, stop)])

    got = product.weight.cpu().t()
    assert torch.equal(got.narrow(dim, 0, 50), weight.narrow(dim, start, 50))
    assert not got.narrow(dim, 50, beyond).any()


def test_a_rank_may_lie_beyond_a_matrix(npu: Any, directory: Path) -> None:
    slices = make_slices(npu, directory, torch.float32)

    for dim, end in enumerate((OUT, IN)):
        part = slices.matrix("float32", (OUT, IN), dim, end + 5, end + 9)
        product: Any = slices.product([part])
        assert product.weight.cpu().eq(0).all()


def test_a_product_of_several_is_on_the_device_once_while_it_is_loaded(
    npu: Any, directory: Path
) -> None:
    slices = make_slices(npu, directory, torch.bfloat16)
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()

    product: Any = slices.fused([("bfloat16", OUT, 0, OUT)] * 4, IN, has_bias=False)

    working = torch.npu.max_memory_allocated() - before - product.weight.nbytes
    assert working <= 2 * PIECE_BYTES < product.weight.nbytes // 2
