"""Quantisation of activations and int8 products against plain torch."""

import pytest
import torch
import torch_npu
from paged import TOLERANCE

HALVES = [torch.bfloat16, torch.float16]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    assert torch.allclose(got.cpu().float(), want.float(), atol=tolerance, rtol=tolerance)


def refused(operator, rule, call):
    with pytest.raises(RuntimeError) as error:
        call()
    assert operator + ": " in str(error.value) and rule in str(error.value)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("smooth", [None, "all", "groups"])
def test_dynamic_quant(dtype, smooth):
    x = torch.randn(3, 4, 32).to(dtype)
    x[1, 2] = 0
    options, factors = {}, torch.ones(12, 32)
    if smooth == "all":
        factors = torch.rand(32).to(dtype)
        options = {"smooth_scales": factors.npu()}
    elif smooth == "groups":
        groups = torch.rand(3, 32).to(dtype)
        options = {
            "smooth_scales": groups.npu(),
            "group_index": torch.tensor([5, 5, 12]).int().npu(),
        }
        factors = groups[[0] * 5 + [2] * 7]

    out, scale = torch_npu.npu_dynamic_quant(x.npu(), **options)

    values = (x.float().view(12, 32) * factors.float()).view(3, 4, 32)
    want = values.abs().amax(-1) / 127
    assert out.dtype == torch.int8 and scale.shape == (3, 4)
    assert torch.allclose(scale.cpu(), want)
    back = out.cpu().float() * scale.cpu()[..., None]
    assert ((back - values).abs() <= want[..., None] * 0.501 + 1e-9).all()


def test_dynamic_quant_refuses():
    x, name = torch.zeros(2, 32).half().npu(), "aclnnDynamicQuantV2"
    refused(name, "x must be float16", lambda: torch_npu.npu_dynamic_quant(x.float()))
    half = torch.zeros(16).half().npu()
    refused(name, "smooth_scales", lambda: torch_npu.npu_dynamic_quant(x, smooth_scales=half))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("per_column", [True, False])
@pytest.mark.parametrize("bias", [None, torch.int32, torch.float32])
def test_quantised_products(dtype, per_column, bias):
    a, b = (torch.randint(-127, 128, s, dtype=torch.int8) for s in ((5, 32), (32, 24)))
    scale, rows = torch.rand(24 if per_column else 1) / 300, torch.rand(5)
    added = None if bias is None else (torch.randn(24) * 100).to(bias)

    out = torch_npu.npu_quant_matmul(
        a.npu(),
        b.npu(),
        scale.npu(),
        pertoken_scale=rows.npu(),
        bias=None if added is None else added.npu(),
        output_dtype=dtype,
    )

    sums = (a.long() @ b.long()).float()
    if bias == torch.int32:
        sums = sums + added
    want = sums * scale * rows[:, None]
    if bias == torch.float32:
        want = want + added
    assert out.dtype == dtype
    assert_close(out, want)


def test_quantised_weights_multiply_as_the_weights_do():
    x, weight = torch.randn(6, 64).bfloat16(), torch.randn(48, 64)
    step = weight.abs().amax(1) / 127
    quantised = (weight / step[:, None]).round().to(torch.int8)
    rows, row_scale = torch_npu.npu_dynamic_quant(x.npu())
    out = torch_npu.npu_quant_matmul(
        rows,
        quantised.t().contiguous().npu(),
        step.npu(),
        pertoken_scale=row_scale,
        output_dtype=torch.bfloat16,
    )
    want = x.float() @ weight.t()
    assert (out.cpu().float() - want).abs().max() < 0.03 * want.abs().max()


def test_quantised_products_refuse():
    a, scale = torch.zeros(5, 32, dtype=torch.int8).npu(), torch.ones(24).npu()
    b, name = torch.zeros(32, 24, dtype=torch.int8).npu(), "aclnnQuantMatmulV5"

    def call(**options):
        scales = options.pop("scale", scale)
        return lambda: torch_npu.npu_quant_matmul(
            a, b, scales, **{"output_dtype": torch.bfloat16, **options}
        )

    refused(name, "scale must have 1 or 24", call(scale=torch.ones(7).npu()))
    refused(name, "scale of Long", call(scale=torch.ones(24, dtype=torch.int64).npu()))
    refused(name, "one for each of 5 rows", call(pertoken_scale=torch.ones(4).npu()))
