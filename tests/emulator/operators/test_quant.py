"""Quantisation of activations and int8 products are compared with plain torch."""

import pytest
import torch
import torch_npu

from tests.emulator.compare import assert_close, refused_by

HALVES = [torch.bfloat16, torch.float16]


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
    refused_by(name, "x must be float16", lambda: torch_npu.npu_dynamic_quant(x.float()))
    half = torch.zeros(16).half().npu()
    refused_by(name, "smooth_scales", lambda: torch_npu.npu_dynamic_quant(x, smooth_scales=half))


def steps(rows):
    """Quantise rows to int8 by the formulas in the fused operators' documents; return values and
    scales.
    """
    scale = rows.abs().amax(-1) / 127
    return torch.where(scale[:, None] > 0, rows / scale[:, None], 0.0).round(), scale


def assert_int8(values, scale, want):
    want_values, want_scale = steps(want)
    assert values.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.allclose(scale.cpu(), want_scale, rtol=1e-5)
    difference = (values.cpu() - want_values).abs()
    assert difference.max() <= 1 and difference.mean() < 0.01  # values between two steps


def rms_norm(x, gamma):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma.float()


# torch_npu accepts calls without a mask since release 2.13, which is also the first release with
# ``_sleep``.
MASKS = [[True, False], *([None] if hasattr(torch.npu, "_sleep") else [])]


def quantised_norm(x, residual, gamma, **options):
    options = {"epsilon": 1e-6, "output_mask": [True, False], **options}
    values, _, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
        x.npu(), residual.npu(), gamma.npu(), **options
    )
    return values, scale, total


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_quantised_norm_is_that_of_the_sum_before_it_is_rounded(dtype, mask):
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    x[2] = residual[2] = 0
    gamma = torch.rand(64).to(dtype)

    values, scale, total = quantised_norm(x, residual, gamma, output_mask=mask)

    assert_close(total, x.float() + residual.float())
    assert_int8(values, scale, rms_norm(x.float() + residual.float(), gamma))
    assert not values[2].any() and scale[2] == 0


def test_a_quantised_norm_is_within_two_steps_of_norm_and_quantisation():
    # Separate norm and quantisation round to bfloat16 twice. Each rounding has a relative error of
    # at most 1 / 256, both in an element and in the row's largest element. Together, these four
    # errors are at most 127 * 4 / 256, which is less than two steps of int8.
    x, residual, gamma = (torch.randn(*s).bfloat16() for s in ((64, 256), (64, 256), (256,)))

    values, scale, total = quantised_norm(x, residual, gamma)
    normed, _, want_total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-6)
    want, want_scale = torch_npu.npu_dynamic_quant(normed)

    assert torch.equal(total.cpu(), want_total.cpu())
    difference = (values.cpu().int() - want.cpu().int()).abs()
    assert difference.max() <= 2 and (difference > 1).float().mean() < 0.001
    assert torch.allclose(scale.cpu(), want_scale.cpu(), rtol=2 / 256)


def test_quantised_norms_refuse():
    x, gamma, name = torch.zeros(2, 64).half(), torch.zeros(64).half(), "RmsNormDynamicQuantV2"

    def call(x=x, residual=x, gamma=gamma, **options):
        return lambda: quantised_norm(x, residual, gamma, **options)

    refused_by(name, "x1 must be float16 or bfloat16", call(x.float(), x.float(), gamma.float()))
    refused_by(name, "x2 must be", call(residual=x.bfloat16()))
    refused_by(name, "gamma must be", call(gamma=gamma.bfloat16()))
    refused_by(name, "gamma of shape", call(gamma=gamma[:32]))
    refused_by(name, "must not be empty", call(x[:0], x[:0]))
    refused_by(name, "epsilon must be above 0", call(epsilon=0.0))
    refused_by(name, "beta are not emulated", call(beta=gamma.npu()))


def quantised_swiglu(x, **options):
    options = {"activate_left": True, "quant_mode": 1, **options}
    return torch_npu.npu_dequant_swiglu_quant(x.npu(), **options)


@pytest.mark.parametrize("left", [True, False])
def test_a_quantised_swiglu(left):
    x = torch.randn(5, 128).bfloat16()
    x[3] = 0
    gate, up = x.float().chunk(2, -1) if left else x.float().chunk(2, -1)[::-1]

    values, scale = quantised_swiglu(x, activate_left=left)

    assert_int8(values, scale, torch.nn.functional.silu(gate) * up)
    assert not values[3].any() and scale[3] == 0


def test_a_quantised_swiglu_is_within_a_step_of_swiglu_and_quantisation():
    # Between the separate operators, only the result of SwiGLU is rounded.
    x = torch.randn(64, 512).bfloat16()

    values, scale = quantised_swiglu(x)
    want, want_scale = torch_npu.npu_dynamic_quant(torch_npu.npu_swiglu(x.npu()))

    assert (values.cpu().int() - want.cpu().int()).abs().max() <= 1
    assert torch.allclose(scale.cpu(), want_scale.cpu(), rtol=1 / 256)


def test_quantised_swiglus_refuse():
    x, name = torch.zeros(2, 128).bfloat16(), "aclnnDequantSwigluQuantV2"
    groups = torch.tensor([2]).npu()

    refused_by(name, "x must be bfloat16", lambda: quantised_swiglu(x.half()))
    refused_by(name, "two dimensions", lambda: quantised_swiglu(x[None]))
    refused_by(name, "no multiple of 64", lambda: quantised_swiglu(x[:, :96].contiguous()))
    refused_by(name, "x of Int is not emulated", lambda: quantised_swiglu(x.int()))
    refused_by(name, "quant_mode static", lambda: quantised_swiglu(x, quant_mode=0))
    refused_by(name, "not emulated", lambda: quantised_swiglu(x, group_index=groups))
    refused_by(name, "swiglu_mode 1", lambda: quantised_swiglu(x, swiglu_mode=1))


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

    refused_by(name, "scale must have 1 or 24", call(scale=torch.ones(7).npu()))
    refused_by(name, "scale of Long", call(scale=torch.ones(24, dtype=torch.int64).npu()))
    refused_by(name, "one for each of 5 rows", call(pertoken_scale=torch.ones(4).npu()))


GROUPS = 3


def grouped(dtype, **changes):
    call = {
        "x": torch.randint(-127, 128, (9, 32), dtype=torch.int8),
        "weight": torch.randint(-127, 128, (GROUPS, 32, 24), dtype=torch.int8),
        "scale": (torch.rand(GROUPS, 24) / 300).to(
            torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        ),
        "per_token_scale": torch.rand(9),
        "group_list": torch.tensor([4, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 3,
        "output_dtype": dtype,
    } | changes

    def run():
        on_device = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
        x, weight = on_device.pop("x"), on_device.pop("weight")
        for name in ("scale", "per_token_scale", "bias"):
            if name in on_device:
                on_device[name] = [on_device[name]]
        return torch_npu.npu_grouped_matmul([x], [weight], **on_device)[0]

    return call, run


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cumulative", [True, False])
def test_quantised_products_of_groups(dtype, cumulative):
    ends = {"group_list": torch.tensor([4, 4, 7]), "group_list_type": 0} if cumulative else {}
    call, run = grouped(dtype, **ends)

    out = run()

    assert out.dtype == dtype and out.shape == (9, 24)
    for group, rows in [(0, slice(0, 4)), (2, slice(4, 7))]:
        sums = (call["x"][rows].long() @ call["weight"][group].long()).float()
        want = sums * call["scale"][group].float() * call["per_token_scale"][rows, None]
        assert_close(out[rows], want)


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("scale must be BFloat16 for results of BFloat16", {"scale": torch.ones(GROUPS, 24)}),
        ("a column for each of 24 outputs", {"scale": torch.ones(GROUPS, 23).bfloat16()}),
        ("a row for each of 3 groups", {"scale": torch.ones(24).bfloat16()}),
        ("one for each of 9 rows", {"per_token_scale": torch.ones(8)}),
        ("one for each of 9 rows", {"per_token_scale": torch.ones(9).bfloat16()}),
        ("must both be int8", {"weight": torch.zeros(GROUPS, 32, 24).bfloat16()}),
        ("bias and act_type", {"bias": torch.ones(GROUPS, 24, dtype=torch.int32)}),
        ("bias and act_type", {"act_type": 5}),
        ("with group_list_type 1", {"weight": torch.zeros(1, 32, 24, dtype=torch.int8),
                                    "group_list": torch.tensor([9])}),
        ("does not fit", {"weight": torch.zeros(GROUPS, 31, 24, dtype=torch.int8)}),
    ],
)  # fmt: skip
def test_quantised_products_of_groups_refuse(rule, changes):
    _, run = grouped(torch.bfloat16, **changes)
    with pytest.raises(RuntimeError) as error:
        run()
    assert "aclnnGroupedMatmul" in str(error.value) and rule in str(error.value)
