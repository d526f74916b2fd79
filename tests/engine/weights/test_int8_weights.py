"""Weights in int8 are read from files, or quantised during loading. Their values and products are
compared with floats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from dist_aclgraph.comm.groups import ONE_RANK, CommGroup, RankGroups
from dist_aclgraph.errors import ConfigError, MissingTensorError, UnsupportedModelError
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.int8_products import Int8GroupedProduct, Int8Linear
from dist_aclgraph.layers.linear import Linear
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.int8_weights import Matrix, quantise
from dist_aclgraph.models.loading import WeightSlices

OUT, IN = 46, 70
SHAPE = (OUT, IN)
PARTS = [(dim, size) for dim in (0, 1) for size in (1, 2, 4, 7)]


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    # The outputs have weights of very different size, so that another output's scale would give a
    # large error.
    return (torch.randn(SHAPE) * torch.logspace(-3, 1, OUT).unsqueeze(1)).bfloat16().float()


def write(directory: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


def int8_tensors(weight: Tensor, name: str = "w") -> dict[str, Tensor]:
    """Quantise a weight, each output separately, by the formula of published tools."""
    scales = torch.stack([row.abs().max() / 127 for row in weight])
    values = torch.stack([torch.round(row / s) for row, s in zip(weight, scales, strict=True)])
    return {f"{name}.weight": values.to(torch.int8), f"{name}.weight_scale": scales}


def make_slices(npu: Any, checkpoint: Checkpoint, size: int = 1, rank: int = 0) -> WeightSlices:
    group = CommGroup(tuple(range(size)), rank)
    groups = RankGroups(tp=group, ep=ONE_RANK.ep)
    return WeightSlices(checkpoint, group, npu.device, ExpertSetup(groups))


def read(checkpoint: Checkpoint, dim: int, start: int, stop: int) -> Matrix:
    return checkpoint.read_matrix("w.weight", SHAPE, dim, start, stop)


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5), min_size=1))
def test_a_quantised_weight_is_within_half_a_step(rows: list[list[float]]) -> None:
    weight = torch.tensor(rows)

    values, scale = quantise(weight)

    # If a scale is a denormal float32 number, it is rounded, which adds the error ``tiny``.
    error, tiny = (values.double() * scale - weight).abs(), 128 * 2.0**-149
    assert (error <= scale * (0.5 + 1e-4) + tiny).all()
    assert values.abs().max() <= 127


def test_halves_are_rounded_to_even() -> None:
    values, scale = quantise(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]))

    assert scale.item() == 1
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -127]]


@pytest.mark.parametrize("stored", ["one dimension", "two", "bfloat16"])
@pytest.mark.parametrize(("dim", "size"), PARTS)
def test_quantising_while_loading_gives_what_a_tool_stores(
    tmp_path: Path, weight: Tensor, stored: str, dim: int, size: int
) -> None:
    tensors = int8_tensors(weight)
    if stored == "two":
        tensors["w.weight_scale"] = tensors["w.weight_scale"].view(OUT, 1)
    (tmp_path / "floats").mkdir()
    floats = write(tmp_path / "floats", {"w.weight": weight.bfloat16()})
    read_int8 = Checkpoint(write(tmp_path, tensors), torch.bfloat16)
    made_int8 = Checkpoint(floats, torch.bfloat16, quantises=True)
    if stored == "bfloat16":
        tensors["w.weight_scale"] = tensors["w.weight_scale"].bfloat16()
        read_int8 = Checkpoint(write(tmp_path, tensors), torch.bfloat16)
    part = -(-SHAPE[dim] // size)

    for rank in range(size):
        got, want = (
            read(checkpoint, dim, rank * part, (rank + 1) * part)
            for checkpoint in (read_int8, made_int8)
        )
        assert got.scale is not None
        assert want.scale is not None
        assert got.weight.dtype == torch.int8
        assert torch.equal(got.weight, want.weight)
        rounding = 2**-8 if stored == "bfloat16" else 0
        torch.testing.assert_close(got.scale, want.scale, rtol=rounding, atol=0)


@pytest.mark.parametrize(("dim", "size"), PARTS)
def test_the_parts_of_all_ranks_make_the_whole_and_zeros(
    tmp_path: Path, weight: Tensor, dim: int, size: int
) -> None:
    checkpoint = Checkpoint(write(tmp_path, {"w.weight": weight}), torch.float16, quantises=True)
    part, whole = -(-SHAPE[dim] // size), read(checkpoint, 0, 0, OUT)
    assert whole.scale is not None

    parts = [read(checkpoint, dim, rank * part, (rank + 1) * part) for rank in range(size)]

    joined = torch.cat([matrix.weight for matrix in parts], 1 - dim)
    length = SHAPE[dim]
    assert torch.equal(joined.narrow(1 - dim, 0, length), whole.weight)
    assert not joined.narrow(1 - dim, length, part * size - length).any()
    scales = [matrix.scale for matrix in parts if matrix.scale is not None]
    assert len(scales) == size
    if dim == 0:
        assert torch.equal(torch.cat(scales, 1)[:, :OUT], whole.scale)
    else:  # ranks split the inputs, so all have the same scales
        assert all(torch.equal(scale, whole.scale) for scale in scales)


def error_bound(x: Tensor, weight: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest possible error of x @ weight.T in int8, for each element.

    With row scales r and weight scales s (``step``), |x - r x8| <= r/2 and |w - s w8| <= s/2. The
    operator returns r s (x8 . w8) = (x + d) . (w + e) with |d| <= r/2, |e| <= s/2, which differs
    from x . w by at most s/2 |x|_1 + r/2 |w|_1 + in * r s / 4. The result is rounded to its type,
    and the scales may have been rounded; each rounding adds half of the last bit.
    """
    row = x.abs().amax(1, keepdim=True) / 127
    s = step.flatten()
    bound = s / 2 * x.abs().sum(1, keepdim=True) + row / 2 * weight.abs().sum(1)
    bound = bound + x.shape[1] * row * s / 4
    return bound + torch.finfo(dtype).eps * ((x @ weight.t()).abs() + bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_within_its_bound(npu: Any, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(SHAPE), torch.randn(9, IN).to(dtype)
    x[3], bias = 0, torch.randn(OUT).to(dtype) if has_bias else None
    values, scale = quantise(weight)
    product = Int8Linear(
        values.t().contiguous().to(npu.device),
        scale.flatten().to(npu.device),
        None if bias is None else bias.to(npu.device),
    )

    y = product(x.to(npu.device)).cpu()

    want = x.float() @ weight.t() + (0 if bias is None else bias.float())
    bound = error_bound(x.float(), weight, scale, dtype) + torch.finfo(dtype).eps * want.abs()
    assert y.dtype == dtype
    assert ((y.float() - want).abs() <= bound).all()
    assert ((y.float() - want).abs() > 0).any()
    out = torch.empty_like(y, device=npu.device)
    assert product(x.to(npu.device), out) is out
    assert torch.equal(out.cpu(), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[3, 0, 4], [7]])
def test_products_of_experts_are_within_their_bounds(
    npu: Any, tmp_path: Path, dtype: torch.dtype, counts: list[int]
) -> None:
    torch.manual_seed(2)
    weights, x = torch.randn(len(counts), *SHAPE), torch.randn(9, IN).to(dtype)
    directory = write(tmp_path, {f"{e}.weight": w for e, w in enumerate(weights)})
    slices = make_slices(npu, Checkpoint(directory, dtype, quantises=True))
    experts = [[slices.matrix(str(e), SHAPE, 0, 0, OUT)] for e in range(len(counts))]
    product = slices.expert_product(experts)
    assert isinstance(product, Int8GroupedProduct)

    y = product(x.to(npu.device), torch.tensor(counts).to(npu.device)).cpu().float()

    start = 0
    for weight, count in zip(weights, counts, strict=True):
        rows = slice(start, start + count)
        want = x[rows].float() @ weight.t()
        bound = error_bound(x[rows].float(), weight, quantise(weight)[1], dtype)
        assert ((y[rows] - want).abs() <= bound).all()
        start += count


@pytest.mark.parametrize("quantises", [False, True])
def test_int8_in_the_checkpoint_runs_in_int8_whatever_is_asked(
    npu: Any, tmp_path: Path, weight: Tensor, quantises: bool
) -> None:
    tensors = int8_tensors(weight)
    checkpoint = Checkpoint(write(tmp_path, tensors), torch.bfloat16, quantises=quantises)

    product = make_slices(npu, checkpoint).fused([("w", OUT, 0, OUT)], IN, False)

    assert isinstance(product, Int8Linear)
    assert torch.equal(product.weight.cpu(), tensors["w.weight"].t())
    assert torch.equal(product.scale.cpu(), tensors["w.weight_scale"])


def test_a_product_of_int8_and_float_matrices_has_float_weights(
    npu: Any, tmp_path: Path, weight: Tensor
) -> None:
    tensors = int8_tensors(weight, "a") | {"b.weight": weight}
    slices = make_slices(npu, Checkpoint(write(tmp_path, tensors), torch.bfloat16))

    product = slices.fused([("a", OUT, 0, OUT), ("b", OUT, 0, OUT)], IN, False)

    assert isinstance(product, Linear)
    back = tensors["a.weight"].float() * tensors["a.weight_scale"].unsqueeze(1)
    assert torch.equal(product.weight.cpu(), torch.cat([back, weight]).t().bfloat16())


def test_other_tensors_in_int8_are_read_as_floats(tmp_path: Path, weight: Tensor) -> None:
    tensors = int8_tensors(weight)
    checkpoint = Checkpoint(write(tmp_path, tensors), torch.float32)

    back = tensors["w.weight"].float() * tensors["w.weight_scale"].unsqueeze(1)
    assert torch.equal(checkpoint.read("w.weight", SHAPE), back)
    assert torch.equal(checkpoint.read_part("w.weight", SHAPE, 0, 3, 9), back[3:9])
    assert torch.equal(checkpoint.read_part("w.weight", SHAPE, 1, 3, 9), back[:, 3:9])


def test_a_bias_is_added_once_by_all_ranks(npu: Any, tmp_path: Path, weight: Tensor) -> None:
    tensors = int8_tensors(weight) | {"w.bias": torch.ones(OUT)}
    checkpoint = Checkpoint(write(tmp_path, tensors), torch.bfloat16)

    alone, one_of_two = (
        make_slices(npu, checkpoint, size).row_parallel("w", SHAPE, 0, IN // size, True)
        for size in (1, 2)
    )

    x = torch.zeros(1, IN, dtype=torch.bfloat16, device=npu.device)
    assert alone(x).cpu().eq(1).all()
    assert one_of_two.product(x[:, : IN // 2].contiguous()).cpu().eq(0).all()
    assert one_of_two.bias is not None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w.weight_offset": torch.ones(OUT)}, UnsupportedModelError, r"w\.weight_offset .* symm"),
        ({"w.weight_scale": torch.ones(OUT, 2)}, MissingTensorError, r"\(46, 2\).*\(46, 1\)"),
        ({"w.weight_scale": None}, MissingTensorError, r"no tensor w\.weight_scale"),
    ],
)
def test_scales_and_offsets_that_do_not_fit_are_refused(
    tmp_path: Path, weight: Tensor, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors = {k: v for k, v in (int8_tensors(weight) | changes).items() if v is not None}

    with pytest.raises(error, match=message):
        read(Checkpoint(write(tmp_path, tensors), torch.bfloat16), 0, 0, OUT)


def test_offsets_of_zero_are_none(tmp_path: Path, weight: Tensor) -> None:
    tensors = int8_tensors(weight) | {"w.weight_offset": torch.zeros(OUT, 1)}

    matrix = read(Checkpoint(write(tmp_path, tensors), torch.bfloat16), 0, 0, OUT)

    assert torch.equal(matrix.weight, tensors["w.weight"].t())


@pytest.mark.parametrize("quantises", [False, True])
def test_int8_products_of_float32_are_refused(
    tmp_path: Path, weight: Tensor, quantises: bool
) -> None:
    tensors = {"w.weight": weight} if quantises else int8_tensors(weight)

    with pytest.raises(ConfigError, match=r"dtype is float32.*set dtype=bfloat16"):
        read(Checkpoint(write(tmp_path, tensors), torch.float32, quantises=quantises), 0, 0, OUT)


@pytest.mark.parametrize("stored", ["int8", "bfloat16", "quantised now"])
@pytest.mark.parametrize("dim", [0, 1])
def test_device_and_host_convert_a_slice_to_the_same_values(
    npu: Any, tmp_path: Path, weight: Tensor, stored: str, dim: int
) -> None:
    tensors = int8_tensors(weight) if stored == "int8" else {"w.weight": weight.bfloat16()}
    directory, quantises = write(tmp_path, tensors), stored == "quantised now"

    host, device = (
        read(Checkpoint(directory, torch.bfloat16, device=where, quantises=quantises), dim, 20, 80)
        for where in (torch.device("cpu"), npu.device)
    )

    assert device.weight.device == npu.device
    assert torch.equal(device.weight.cpu(), host.weight)
    assert (device.scale is None) == (host.scale is None) == (stored == "bfloat16")
    if device.scale is not None and host.scale is not None:
        assert torch.equal(device.scale.cpu(), host.scale)


@pytest.mark.parametrize("quantises", [False, True])
def test_experts_are_on_the_device_once_while_they_are_loaded(
    npu: Any, tmp_path: Path, quantises: bool
) -> None:
    count, shape = 24, (256, 512)
    weights = torch.randn(count, *shape).bfloat16()
    directory = write(tmp_path, {f"{e}.weight": w for e, w in enumerate(weights)})
    checkpoint = Checkpoint(directory, torch.bfloat16, device=npu.device, quantises=quantises)
    slices = make_slices(npu, checkpoint)
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()

    product: Any = slices.expert_product(
        [[slices.matrix(str(e), shape, 0, 0, shape[0])] for e in range(count)]
    )

    held = torch.npu.memory_allocated() - before
    working = torch.npu.max_memory_allocated() - before - held
    float32 = 4 * shape[0] * shape[1]
    assert held >= product.weight.nbytes
    assert working <= (6 if quantises else 2) * float32  # memory for one expert only
    if not quantises:
        assert torch.equal(product.weight.cpu(), weights.transpose(1, 2))


def test_experts_of_which_some_are_floats_are_all_floats(npu: Any, tmp_path: Path) -> None:
    first, second = torch.randn(2, *SHAPE).unbind()
    directory = write(tmp_path, int8_tensors(first, "0") | {"1.weight": second})
    slices = make_slices(npu, Checkpoint(directory, torch.bfloat16, device=npu.device))

    product: Any = slices.expert_product(
        [[slices.matrix(str(e), SHAPE, 0, 0, OUT)] for e in range(2)]
    )

    assert not isinstance(product, Int8GroupedProduct)
    assert torch.equal(product.weight[1].cpu(), second.t().bfloat16())
