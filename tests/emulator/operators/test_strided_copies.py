"""Copies between tensors with any strides are compared with torch's copies on the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws import examples

DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.int64)
# Lengths near the size of a cache line, and near the sizes of the tiles in which data is copied.
LENGTHS = st.sampled_from([1, 2, 3, 31, 32, 33, 64, 255, 256, 257, 300])


def view(tensor: torch.Tensor, order: list[int], step: int) -> torch.Tensor:
    return tensor.permute(order)[..., ::step]


@examples(600)
@given(
    st.lists(LENGTHS, min_size=2, max_size=2),
    st.integers(1, 3),
    st.permutations(range(3)),
    st.permutations(range(3)),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
)
def test_a_copy_between_views_is_that_of_the_host(
    lengths: list[int],
    short: int,
    from_order: list[int],
    to_order: list[int],
    step: int,
    dtype: torch.dtype,
) -> None:
    source = torch.randint(-100, 100, (*lengths, short)).to(dtype)
    taken = view(source, from_order, step)
    shape = [0, 0, 0]
    for place, length in zip(to_order, taken.shape, strict=True):
        shape[place] = length
    want, got = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype, device="npu")

    want.permute(to_order).copy_(taken)
    got.permute(to_order).copy_(view(source.npu(), from_order, step))

    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_column_of_a_wide_matrix_is_copied(dtype: torch.dtype) -> None:
    source = torch.arange(70 * 600).reshape(70, 600).to(dtype)

    assert torch.equal(source.npu()[:, 599].contiguous().cpu(), source[:, 599])
