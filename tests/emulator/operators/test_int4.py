"""Products with weights of four bits are compared with plain torch."""

import pytest
import torch
import torch_npu

from tests.emulator.compare import refused

HALVES = [torch.bfloat16, torch.float16]
K, N, GROUPS = 256, 24, 3


def pack(values: torch.Tensor) -> torch.Tensor:
    """Pack eight values of the last dimension into an int32, as the operator's document says."""
    bits = values.long().unflatten(-1, (-1, 8)) & 15
    words = sum(bits[..., i] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8)


def bits_of(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().view(torch.int32).long()


def on_device(call: dict, *lists: str) -> dict:
    moved = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    return moved | {name: [moved[name]] for name in lists if moved.get(name) is not None}


def test_the_wheel_packs_as_the_emulator_unpacks():
    values = int4(6, 16)
    packed = torch_npu.npu_convert_weight_to_int4pack(values.int().npu())
    assert torch.equal(packed.cpu(), pack(values))


def float_call(dtype, group=32, **changes):
    rows = K // group if group else 1
    return {
        "x": torch.randn(5, K).to(dtype),
        "weight": pack(int4(K, N)),
        "antiquant_scale": (torch.rand(rows, N) / 50).to(dtype),
        "antiquant_group_size": group,
    } | changes


def dequantised(values, scale, offset=None):
    rows = values.shape[0] // scale.shape[0]
    steps = values.float() + (0 if offset is None else offset.float().repeat_interleave(rows, 0))
    return (steps * scale.float().repeat_interleave(rows, 0)).to(scale.dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("extra", [None, "offset", "bias"])
def test_floats_times_int4(dtype, group, extra):
    values = int4(K, N)
    call = float_call(dtype, group, weight=pack(values))
    offset = bias = None
    if extra == "offset":
        offset = call["antiquant_offset"] = torch.randint(-3, 4, call["antiquant_scale"].shape).to(
            dtype
        )
    if extra == "bias":
        bias = torch.randn(N).to(torch.float32 if dtype == torch.bfloat16 else dtype)
        call["bias"] = bias

    out = torch_npu.npu_weight_quant_batchmatmul(**on_device(call)).cpu()

    weight = dequantised(values, call["antiquant_scale"], offset)
    assert out.dtype == dtype
    if bias is None:  # equal, bit by bit, to the product with dequantised weights
        assert torch.equal(out, torch.mm(call["x"].npu(), weight.npu()).cpu())
    want = call["x"].float() @ weight.float() + (0 if bias is None else bias.float())
    assert ((out.float() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-4).all()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("antiquantScale must be BFloat16", {"antiquant_scale": torch.ones(8, N)}),
        ("antiquantScale must be [8, 24]", {"antiquant_scale": torch.ones(4, N).bfloat16()}),
        ("multiple of 32", {"antiquant_group_size": 48}),
        ("multiple of 32", {"antiquant_group_size": K, "antiquant_scale": torch.ones(1, N)}),
        ("without groups", {"antiquant_group_size": 0}),
        ("shape of antiquantScale", {"antiquant_offset": torch.ones(1, N).bfloat16()}),
        ("bias must be Float", {"bias": torch.ones(N).bfloat16()}),
        ("for 24 columns", {"bias": torch.ones(N + 1)}),
        ("x must be float16 or bfloat16", {"x": torch.ones(5, K)}),
        ("only weights of four bits", {"weight": int4(K, N)}),
        ("k of x and weight", {"x": torch.ones(5, 2 * K).bfloat16()}),
    ],
)
def test_floats_times_int4_refuse(rule, changes):
    call = float_call(torch.bfloat16, **changes)
    refused(rule, lambda: torch_npu.npu_weight_quant_batchmatmul(**on_device(call)))


def int8_call(dtype, values, **changes):
    scale = torch.rand(K // 256, N) / 300
    weights = values.float() * scale.repeat_interleave(256, 0)
    return {
        "x1": torch.randint(-127, 128, (5, K), dtype=torch.int8),
        "x2": pack(values),
        "scale": bits_of(scale),
        "offset": 8 * weights.sum(0),
        "pertoken_scale": torch.rand(5, 1),
        "output_dtype": dtype,
        "group_sizes": [0, 0, 256],
    } | changes, weights


@pytest.mark.parametrize("dtype", HALVES)
def test_int8_times_int4(dtype):
    call, weights = int8_call(dtype, int4(K, N))

    out = torch_npu.npu_quant_matmul(**on_device(call)).cpu()

    want = (call["x1"].double() @ weights.double()).float() * call["pertoken_scale"]
    assert out.dtype == dtype
    assert ((out.float() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-3).all()


def test_int8_times_int4_with_a_scale_for_each_output():
    values = int4(K, N)
    call, _ = int8_call(torch.bfloat16, values)
    whole = torch_npu.npu_quant_matmul(**on_device(call)).cpu()
    call |= {"scale": call["scale"][0], "pertoken_scale": call["pertoken_scale"][:, 0]}

    out = torch_npu.npu_quant_matmul(**on_device(call | {"group_sizes": None})).cpu()

    assert torch.equal(out, whole)


def test_the_sums_correct_what_the_cube_unit_subtracts():
    call, _ = int8_call(torch.bfloat16, int4(K, N))
    right, wrong = (
        torch_npu.npu_quant_matmul(**on_device(call | {"offset": offset})).cpu().float()
        for offset in (call["offset"], call["offset"] + 1)
    )
    assert torch.allclose(wrong - right, call["pertoken_scale"].expand(5, N), rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("pertoken_scale must be [5, 1]", {"pertoken_scale": torch.ones(5)}),
        ("group size of k must be 256", {"group_sizes": [0, 0, 128]}),
        ("offset must be float32", {"offset": None}),
        ("scale must be [1, 24]", {"scale": torch.ones(2, N, dtype=torch.int64)}),
        ("scale must be int64", {"scale": torch.ones(1, N)}),
        ("bias must be null", {"bias": torch.ones(N)}),
        ("multiple of 256", {"x1": torch.ones(5, 128, dtype=torch.int8),
                             "x2": torch.ones(128, 3, dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_int8_times_int4_refuse(rule, changes):
    call, _ = int8_call(torch.bfloat16, int4(K, N), **changes)
    refused(rule, lambda: torch_npu.npu_quant_matmul(**on_device(call)))


def test_scales_of_outputs_alone_need_cann_9(run_script):
    call = """
x1 = torch.ones(5, 256, dtype=torch.int8).npu()
x2 = torch.ones(256, 3, dtype=torch.int32).npu()
scale, rows, sums = (torch.ones(n).npu() for n in (24, 5, 24))
try:
    torch_npu.npu_quant_matmul(x1, x2, scale.long(), offset=sums, pertoken_scale=rows,
                               output_dtype=torch.bfloat16)
except RuntimeError as error:
    print("REFUSED", error)
"""
    status, output = run_script(call, cann="8.5.0")
    assert status == 0 and "scale must be [1, 24] before CANN 9.0" in output


LISTS = ("bias", "scale", "antiquant_scale", "antiquant_offset", "per_token_scale")


def run_grouped(call):
    moved = on_device(call, *LISTS)
    x, weight = moved.pop("x"), moved.pop("weight")
    return torch_npu.npu_grouped_matmul([x], [weight], **moved)[0].cpu()


def grouped_call(**others):
    return {
        "group_list": torch.tensor([4, 0, 3]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 3,
    } | others


def float_groups(dtype, values, parts=8, **changes):
    shape = (GROUPS, parts, N) if parts else (GROUPS, N)
    return (
        grouped_call(
            x=torch.randn(9, K).to(dtype),
            weight=pack(values),
            antiquant_scale=(torch.rand(shape) / 50).to(dtype),
            antiquant_offset=torch.zeros(shape).to(dtype),
        )
        | changes
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parts", [0, 1, 8])
@pytest.mark.parametrize("cumulative", [True, False])
def test_groups_of_floats_times_int4(dtype, parts, cumulative):
    values = int4(GROUPS, K, N)
    ends = {"group_list": torch.tensor([4, 4, 7]), "group_list_type": 0} if cumulative else {}
    call = float_groups(dtype, values, parts, **ends)

    out = run_grouped(call)

    for group, rows in [(0, slice(0, 4)), (2, slice(4, 7))]:
        scale = call["antiquant_scale"][group].view(-1, N)
        want = torch.mm(call["x"][rows].npu(), dequantised(values[group], scale).npu()).cpu()
        assert torch.equal(out[rows], want)


def int8_groups(dtype, values, parts=1, **changes):
    scale = torch.rand(GROUPS, parts, N) / 300
    weights = values.float() * scale.repeat_interleave(K // parts, 1)
    return grouped_call(
        x=torch.randint(-127, 128, (9, K), dtype=torch.int8),
        weight=pack(values),
        scale=bits_of(scale),
        bias=8 * weights.sum(1),
        per_token_scale=torch.rand(9),
        output_dtype=dtype,
    ) | changes, weights


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_int8_times_int4(dtype, groups):
    values = int4(GROUPS, 256 * groups, N)
    call, weights = int8_groups(dtype, values, groups) if groups == 1 else (None, None)
    if groups > 1:
        scale = torch.rand(GROUPS, groups, N) / 300
        weights = values.float() * scale.repeat_interleave(256, 1)
        call, _ = int8_groups(dtype, values[:, :K])
        rows = torch.randint(-127, 128, (9, 256 * groups), dtype=torch.int8)
        call |= {"x": rows, "weight": pack(values)}
        call |= {"scale": bits_of(scale), "bias": 8 * weights.sum(1)}

    out = run_grouped(call)

    for group, rows in [(0, slice(0, 4)), (2, slice(4, 7))]:
        want = call["x"][rows].double() @ weights[group].double()
        want = want.float() * call["per_token_scale"][rows, None]
        assert (
            (out[rows].float() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 1e-3
        ).all()


@pytest.mark.parametrize(
    ("rule", "make", "changes"),
    [
        ("antiquantOffset must not be null", float_groups, {"antiquant_offset": None}),
        ("antiquantScale must not be null", float_groups, {"antiquant_scale": None}),
        ("a divisor of 256", float_groups, {"antiquant_scale": torch.ones(3, 7, N).bfloat16()}),
        ("shape of antiquantScale", float_groups,
         {"antiquant_offset": torch.zeros(3, N).bfloat16()}),
        ("antiquantScale must be BFloat16", float_groups, {"antiquant_scale": torch.ones(3, 8, N)}),
        ("per_token_scale is not emulated", float_groups, {"per_token_scale": torch.ones(9)}),
        ("bias must be float32", int8_groups, {"bias": None}),
        ("scale must be int64", int8_groups, {"scale": torch.ones(3, 1, N)}),
        ("scale must be int64", int8_groups, {"scale": torch.ones(3, N, dtype=torch.int64)}),
        ("groups of 256", int8_groups, {"scale": torch.ones(3, 2, N, dtype=torch.int64)}),
        ("one for each of 9 rows", int8_groups, {"per_token_scale": torch.ones(8)}),
        ("need group_list_type 1", int8_groups, {"group_list_type": 0}),
        ("multiple of 64", int8_groups, {"x": torch.ones(9, 96, dtype=torch.int8),
                                         "weight": torch.ones(3, 96, 3, dtype=torch.int32)}),
    ],
)  # fmt: skip
def test_groups_of_int4_refuse(rule, make, changes):
    made = make(torch.bfloat16, int4(GROUPS, K, N), **changes)
    call = made[0] if isinstance(made, tuple) else made
    refused(rule, lambda: run_grouped(call))
