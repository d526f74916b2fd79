"""Weights of four bits are read from files; their values and products are compared with floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dist_aclgraph.comm.groups import ONE_RANK, CommGroup, RankGroups
from dist_aclgraph.errors import ConfigError, MissingTensorError, ModelError, UnsupportedModelError
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.int4_weights import pack_pairs
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.int4_formats import Int4Format, Int4Formats
from tests.int4_checkpoints import (
    Tensors,
    Writer,
    bytes_each,
    dequantise,
    packed_ints,
    pairs_of_inputs,
    pairs_of_outputs,
    pairs_with_two_scales,
    quantise,
)

OUT, IN = 48, 512
SHAPE = (OUT, IN)
FLOAT_ROWS = [(None, bytes_each), (None, pairs_of_inputs), (None, packed_ints)]
FLOAT_ROWS += [(g, w) for g in (32, 128) for w in (packed_ints, bytes_each, pairs_of_outputs)]
INT8_ROWS = [(None, bytes_each), (None, pairs_of_outputs)]
INT8_ROWS += [(256, pairs_with_two_scales), (256, packed_ints)]
EIGHT = torch.full(SHAPE, 8, dtype=torch.int8)
HALVES = [torch.bfloat16, torch.float16]


def open_checkpoint(
    directory: Path,
    tensors: Tensors,
    form: Int4Format,
    dtype: torch.dtype = torch.bfloat16,
    modules: tuple[str, ...] = ("w",),
) -> Checkpoint:
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return Checkpoint(directory, dtype, int4=Int4Formats(dict.fromkeys(modules, form)))


def make_slices(npu: Any, checkpoint: Checkpoint, size: int = 1, rank: int = 0) -> WeightSlices:
    groups = RankGroups(tp=CommGroup(tuple(range(size)), rank), ep=ONE_RANK.ep)
    return WeightSlices(checkpoint, groups.tp, npu.device, ExpertSetup(groups))


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return one_sign(torch.randn(SHAPE)) * torch.logspace(-2, 0, OUT)[:, None]


def one_sign(weight: Tensor) -> Tensor:
    """Make the weights of every second output positive. Then the sum of these weights is large, and
    an error in this sum is noticed.

    The weights of different outputs have very different sizes, so that another output's scale would
    also give a large error.
    """
    weight[::2].abs_()
    return weight


@pytest.mark.parametrize(("group", "writer"), FLOAT_ROWS)
def test_every_stored_form_is_read_as_the_same_floats(
    tmp_path: Path, weight: Tensor, group: int | None, writer: Writer
) -> None:
    values, scales = quantise(weight, group)
    form = Int4Format(quantises_rows=False, group=group)
    checkpoint = open_checkpoint(tmp_path, writer("w", values, scales), form, torch.float32)
    want = dequantise(values, scales)

    assert torch.equal(checkpoint.read("w.weight", SHAPE), want)
    for start, stop in ((0, 5), (7, 40), (30, OUT)):
        assert torch.equal(
            checkpoint.read_part("w.weight", SHAPE, 0, start, stop), want[start:stop]
        )
    assert torch.equal(checkpoint.read_part("w.weight", SHAPE, 1, 64, 384), want[:, 64:384])


@pytest.mark.parametrize("writer", [packed_ints, bytes_each])
def test_the_last_group_of_inputs_may_be_shorter(tmp_path: Path, writer: Writer) -> None:
    shape, weight = (OUT, 192), torch.randn(OUT, 256) * torch.logspace(-2, 0, 256)
    values, scales = quantise(weight, 128)
    tensors = writer("w", values[:, :192], scales)
    form = Int4Format(quantises_rows=False, group=128)
    checkpoint = open_checkpoint(tmp_path, tensors, form)
    want = dequantise(values, scales)[:, :192]

    assert torch.equal(checkpoint.read_int4("w.weight", shape, 0, 0, OUT, None).floats(), want)
    assert torch.equal(checkpoint.read_int4("w.weight", shape, 1, 0, 192, None).floats(), want)
    assert torch.equal(checkpoint.read_float32("w.weight", shape), want)


def test_a_last_group_that_no_operator_takes_is_refused(tmp_path: Path) -> None:
    values, scales = quantise(torch.randn(OUT, 256), 128)
    tensors = bytes_each("w", values[:, :136], scales)
    form = Int4Format(quantises_rows=False, group=128)
    checkpoint = open_checkpoint(tmp_path, tensors, form)

    with pytest.raises(ConfigError, match=r"inputs 0 to 136 of w .*a group size that divides"):
        checkpoint.read_int4("w.weight", (OUT, 136), 0, 0, OUT, None)


@pytest.mark.parametrize("writer", [packed_ints, bytes_each, pairs_of_inputs, pairs_of_outputs])
@pytest.mark.parametrize(("start", "stop"), [(21, 61), (4, 600)])
def test_without_groups_a_part_of_the_inputs_may_begin_anywhere(
    tmp_path: Path, weight: Tensor, writer: Writer, start: int, stop: int
) -> None:
    values, scales = quantise(weight, None)
    form = Int4Format(quantises_rows=False, group=None)
    checkpoint = open_checkpoint(tmp_path, writer("w", values, scales), form)

    got = checkpoint.read_int4("w.weight", SHAPE, 1, start, stop, None).floats()

    want = dequantise(values, scales)[:, start:stop]
    assert torch.equal(got[:, : want.shape[1]], want)
    assert not got[:, want.shape[1] :].any()


@pytest.mark.parametrize("writer", [packed_ints, bytes_each])
@pytest.mark.parametrize("num_outputs", [1, 7])
def test_an_odd_number_of_outputs_is_read_as_floats(
    tmp_path: Path, writer: Writer, num_outputs: int
) -> None:
    values, scales = quantise(torch.randn(num_outputs, IN), 32)
    form = Int4Format(quantises_rows=False, group=32)
    checkpoint = open_checkpoint(tmp_path, writer("w", values, scales), form, torch.float32)

    assert torch.equal(checkpoint.read("w.weight", (num_outputs, IN)), dequantise(values, scales))


def test_a_byte_holds_two_outputs_for_all_pairs_of_values() -> None:
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).t().to(torch.int8)

    (packed,) = pack_pairs(values)

    assert torch.equal((packed << 4) >> 4, values[0])
    assert torch.equal(packed >> 4, values[1])


def error_bound(x: Tensor, weight: Tensor, *, quantises: bool, dtype: torch.dtype) -> Tensor:
    """Return the largest possible error of ``x @ weight.T``, for each element.

    If inputs are quantised, each row has a scale r = max|x| / 127, so each element has an error of
    at most r / 2. Dequantised weights and results are rounded to ``dtype``; each rounding changes
    an element by at most half of its last bit. There is no other error.
    """
    eps = torch.finfo(dtype).eps
    row = x.abs().amax(1, keepdim=True) / 127 if quantises else torch.zeros(len(x), 1)
    spread = x.abs() @ weight.abs().t()
    bound = row / 2 * weight.abs().sum(1) + (0 if quantises else eps / 2 * spread)
    return bound + eps * ((x @ weight.t()).abs() + bound) + 1e-5 * spread


CASES = [(False, *case) for case in FLOAT_ROWS] + [(True, *case) for case in INT8_ROWS]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("quantises", "group", "writer"), CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_within_its_bound(
    npu: Any,
    tmp_path: Path,
    weight: Tensor,
    dtype: torch.dtype,
    quantises: bool,
    group: int | None,
    writer: Writer,
    has_bias: bool,
) -> None:
    values, scales = quantise(weight, group)
    scales = scales.to(dtype).float()
    tensors = writer("w", values, scales)
    bias = torch.randn(OUT).to(dtype) if has_bias else None
    if bias is not None:
        tensors["w.bias"] = bias
    checkpoint = open_checkpoint(tmp_path, tensors, Int4Format(quantises, group), dtype)
    product = make_slices(npu, checkpoint).fused([("w", OUT, 0, OUT)], IN, has_bias)
    x = torch.randn(9, IN).to(dtype)
    x[3] = 0

    y = product(x.to(npu.device)).cpu()

    exact = dequantise(values, scales)
    want = x.float() @ exact.t()
    bound = error_bound(x.float(), exact, quantises=quantises, dtype=dtype)
    if bias is not None:
        want, bound = (
            want + bias.float(),
            bound + 2 * torch.finfo(dtype).eps * (want.abs() + bias.float().abs()),
        )
    assert y.dtype == dtype
    assert product.weight.dtype == torch.int32
    assert ((y.float() - want).abs() <= bound).all()
    assert product(x.to(npu.device), out := torch.empty_like(y, device=npu.device)) is out
    assert torch.equal(out.cpu(), y)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("quantises", "group", "writer"), CASES)
@pytest.mark.parametrize("counts", [[3, 0, 4], [7]])
def test_products_of_experts_are_within_their_bounds(
    npu: Any,
    tmp_path: Path,
    dtype: torch.dtype,
    quantises: bool,
    group: int | None,
    writer: Writer,
    counts: list[int],
) -> None:
    torch.manual_seed(2)
    made = [quantise(one_sign(torch.randn(SHAPE)), group) for _ in counts]
    made = [(values, scales.to(dtype).float()) for values, scales in made]
    modules = tuple(map(str, range(len(counts))))
    tensors = {k: v for e, m in zip(modules, made, strict=True) for k, v in writer(e, *m).items()}
    checkpoint = open_checkpoint(tmp_path, tensors, Int4Format(quantises, group), dtype, modules)
    slices = make_slices(npu, checkpoint)
    product = slices.expert_product([[slices.matrix(e, SHAPE, 0, 0, OUT)] for e in modules])
    x = torch.randn(9, IN).to(dtype)

    y = product(x.to(npu.device), torch.tensor(counts).to(npu.device)).cpu().float()

    assert product.weight.dtype == torch.int32
    start = 0
    for matrix, count in zip(made, counts, strict=True):
        rows, exact = slice(start, start + count), dequantise(*matrix)
        bound = error_bound(x[rows].float(), exact, quantises=quantises, dtype=dtype)
        assert ((y[rows] - x[rows].float() @ exact.t()).abs() <= bound).all()
        start += count


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("writer", [packed_ints, pairs_of_outputs])
def test_the_parts_of_all_ranks_make_the_whole_and_zeros(
    tmp_path: Path, weight: Tensor, dim: int, size: int, writer: Writer
) -> None:
    values, scales = quantise(weight, 128)
    form = Int4Format(quantises_rows=False, group=128)
    checkpoint = open_checkpoint(tmp_path, writer("w", values, scales), form)
    unit = 8 if dim == 0 else 32
    part = -(-SHAPE[dim] // size // unit) * unit

    parts = []
    for rank in range(size):
        got = checkpoint.read_int4("w.weight", SHAPE, dim, rank * part, (rank + 1) * part, None)
        parts.append(got.floats())

    whole = torch.cat(parts, dim)
    want = dequantise(values, scales).narrow(dim, 0, min(SHAPE[dim], part * size))
    assert torch.equal(whole.narrow(dim, 0, want.shape[dim]), want)
    assert not whole.narrow(dim, want.shape[dim], whole.shape[dim] - want.shape[dim]).any()


def test_outputs_in_another_order_take_their_scales_with_them(
    npu: Any, tmp_path: Path, weight: Tensor
) -> None:
    values, scales = quantise(weight, 32)
    form = Int4Format(quantises_rows=False, group=32)
    slices = make_slices(npu, open_checkpoint(tmp_path, packed_ints("w", values, scales), form))
    part = slices.matrix("w", SHAPE, 0, 0, OUT)
    x = torch.randn(2, IN).bfloat16().to(npu.device)

    plain, turned = (slices.product([p])(x) for p in (part, part.rearranged(lambda t: t.flip(-1))))

    assert torch.equal(turned.cpu(), plain.cpu().flip(-1))


def test_a_product_of_two_forms_is_in_floats(npu: Any, tmp_path: Path, weight: Tensor) -> None:
    values, scales = quantise(weight, 32)
    tensors = packed_ints("w", values, scales) | {"b.weight": weight}
    form = Int4Format(quantises_rows=False, group=32)
    slices = make_slices(npu, open_checkpoint(tmp_path, tensors, form))

    product = slices.fused([("w", OUT, 0, OUT), ("b", OUT, 0, OUT)], IN, False)

    want = torch.cat([dequantise(values, scales), weight]).t().bfloat16()
    assert torch.equal(product.weight.cpu(), want)


def test_offsets_of_experts_are_one_tensor(npu: Any, tmp_path: Path) -> None:
    form = Int4Format(quantises_rows=False, group=32)
    tensors = packed_ints("w", *quantise(torch.randn(SHAPE), 32))
    slices = make_slices(npu, open_checkpoint(tmp_path, tensors, form))
    parts = [[slices.matrix("w", SHAPE, 0, 0, stop)] for stop in (OUT, OUT // 2)]

    large, small = (slices.expert_product([part]) for part in parts)

    assert small.zeros.data_ptr() == large.zeros.data_ptr()
    assert not large.zeros.any()


def test_rows_for_fewer_outputs_are_refused(tmp_path: Path) -> None:
    """Each byte contains the values of two outputs, so three outputs need two rows of bytes."""
    values, scales = quantise(torch.randn(3, IN), 32)
    form = Int4Format(quantises_rows=False, group=32)
    tensors = pairs_of_outputs("w", values[:2], scales[:2]) | {"w.weight_scale": scales}
    checkpoint = open_checkpoint(tmp_path, tensors, form)

    with pytest.raises(MissingTensorError, match=r"w\.weight has shape \(1, .*packed form"):
        checkpoint.read("w.weight", (3, IN))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w.weight_offset": torch.ones(OUT)}, UnsupportedModelError, r"w\.weight_offset .* symm"),
        ({"w.weight_zero_point": torch.ones(6, 16).int()}, UnsupportedModelError, "symmetrically"),
        ({"w.weight_scale": torch.ones(OUT, 2)}, MissingTensorError, r"\(48, 2\).* with 16 scales"),
        ({"w.weight_scale": None}, MissingTensorError, r"no tensor w\.weight_scale"),
        ({"w.weight_packed": torch.ones(OUT, 60).int()}, MissingTensorError, r"\(48, 60\)"),
        ({"w.weight_packed": torch.ones(OUT, 64).long()}, ModelError, "the type I64; .* in I32"),
        ({"w.weight_packed": None, "w.weight": torch.ones(SHAPE)}, ModelError, "the type F32"),
        ({"w.weight_packed": None, "w.weight": EIGHT}, ModelError, "value 8; .* from -8 to 7"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, weight: Tensor, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    tensors = packed_ints("w", *quantise(weight, 32)) | changes
    form = Int4Format(quantises_rows=False, group=32)
    present = {k: v for k, v in tensors.items() if v is not None}

    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path, present, form).read_int4("w.weight", SHAPE, 0, 0, OUT, None)


@pytest.mark.parametrize(
    ("quantises", "group", "dim", "stop", "message"),
    [
        (False, 128, 1, 48, r"inputs 0 to 48 of w .* multiples of 32 only: choose another"),
        (True, 256, 1, 128, r"multiples of 256 only: choose another parallel\.tp"),
        (True, None, 1, 128, r"128 inputs of w\.weight.* multiple of 256: choose another"),
        (False, 32, 0, 12, r"12 outputs of w\.weight.* multiple of 8: choose another"),
    ],
)
def test_parts_that_no_operator_takes_are_refused(
    npu: Any,
    tmp_path: Path,
    weight: Tensor,
    quantises: bool,
    group: int | None,
    dim: int,
    stop: int,
    message: str,
) -> None:
    tensors = bytes_each("w", *quantise(weight, group))
    slices = make_slices(npu, open_checkpoint(tmp_path, tensors, Int4Format(quantises, group)))

    with pytest.raises(ConfigError, match=message):
        slices.product([slices.matrix("w", SHAPE, dim, 0, stop)])


def test_parts_with_an_odd_number_of_outputs_are_refused(
    npu: Any, tmp_path: Path, weight: Tensor
) -> None:
    tensors = bytes_each("w", *quantise(weight, 32))
    form = Int4Format(quantises_rows=False, group=32)
    slices = make_slices(npu, open_checkpoint(tmp_path, tensors, form))

    with pytest.raises(ConfigError, match=r"odd number of outputs: choose another parallel\.tp"):
        slices.product(
            [slices.matrix("w", SHAPE, 0, start, start + 3) for start in range(0, 32, 4)]
        )


def test_products_of_float32_are_refused(tmp_path: Path, weight: Tensor) -> None:
    form = Int4Format(quantises_rows=False, group=32)
    tensors = packed_ints("w", *quantise(weight, 32))

    with pytest.raises(ConfigError, match=r"dtype is float32.*set dtype=bfloat16"):
        open_checkpoint(tmp_path, tensors, form, torch.float32).read_int4(
            "w.weight", SHAPE, 0, 0, OUT, None
        )
