"""Products of rows with the matrices of several experts are compared with plain torch."""

import pytest
import torch
import torch_npu

from tests.emulator.compare import FLOATS, assert_close, refused


def grouped(x, weight, sizes, bias=None):
    parts = x.float().split(sizes)
    out = [p @ w.float() for p, w in zip(parts, weight, strict=True)]
    if bias is not None:
        out = [o + b.float() for o, b in zip(out, bias, strict=True)]
    return torch.cat(out)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_grouped_products(dtype, cumulative, transposed, biased):
    sizes = [3, 0, 9, 1]
    x, weight = torch.randn(13, 32).to(dtype), torch.randn(4, 32, 24).to(dtype) / 6
    bias = torch.randn(4, 24).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    groups = torch.tensor(sizes).cumsum(0) if cumulative else torch.tensor(sizes)
    right = weight.npu()
    if transposed:
        right = weight.transpose(1, 2).contiguous().npu().transpose(1, 2)

    out = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [right],
        bias=[bias.npu()] if biased else None,
        group_list=groups.npu(),
        split_item=3,
        group_type=0,
        group_list_type=int(not cumulative),
    )

    assert len(out) == 1 and out[0].dtype == dtype
    assert_close(out[0], grouped(x, weight, sizes, bias if biased else None))


def test_grouped_products_of_separate_weights():
    sizes = [3, 0, 9, 1]
    x, weights = torch.randn(13, 32).half(), [torch.randn(32, 24).half() / 6 for _ in sizes]
    bias = [torch.randn(24).half() for _ in sizes]
    out = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [w.npu() for w in weights],
        bias=[b.npu() for b in bias],
        group_list=torch.tensor(sizes).npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
    )
    assert_close(out[0], grouped(x, weights, sizes, bias))


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_grouped_products_of_strided_rows(bits):
    wide = torch.randn(9, 128).half() if not bits else torch.ones(9, 128, dtype=torch.int8)
    wide[:, 64:] = 0
    weight = {
        0: torch.randn(2, 64, 32).half() / 6,
        4: torch.full((2, 64, 4), 0x11111111, dtype=torch.int32),
        8: torch.ones(2, 64, 32, dtype=torch.int8),
    }[bits]
    ones = torch.ones(2, 1, 32).view(torch.int32).long()
    others = {
        0: {},
        4: {"scale": [ones.npu()], "bias": [torch.full((2, 32), 8.0 * 64).npu()]},
        8: {"scale": [torch.ones(2, 32).npu()]},
    }[bits]
    if bits:
        others |= {"per_token_scale": [torch.ones(9).npu()], "output_dtype": torch.float16}

    out = torch_npu.npu_grouped_matmul(
        [wide.npu()[:, :64]],
        [weight.npu()],
        group_list=torch.tensor([4, 5]).npu(),
        group_list_type=1,
        split_item=3,
        group_type=0,
        **others,
    )[0]

    want = torch.full((9, 32), 64.0) if bits else grouped(wide[:, :64], weight, [4, 5])
    assert_close(out, want)


def test_turned_rows_of_grouped_products_are_refused():
    x = torch.zeros(64, 5).half().npu().t()
    weight, ends = torch.zeros(2, 64, 32).half().npu(), torch.tensor([1, 5]).npu()
    refused(
        "x must have contiguous rows",
        lambda: torch_npu.npu_grouped_matmul(
            [x], [weight], group_list=ends, split_item=3, group_type=0
        ),
    )


def test_groups_may_end_before_the_rows():
    x, weight = torch.randn(9, 32).half(), torch.randn(2, 32, 16).half() / 6
    out = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu()], group_list=torch.tensor([2, 5]).npu(), split_item=2, group_type=0
    )
    assert_close(out[0][:5], grouped(x[:5], weight, [2, 3]))


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("weight must be Half", {"weight": torch.zeros(4, 32, 16)}),
        ("bias must be Half", {"bias": torch.zeros(4, 16)}),
        ("group_list must be int64", {"group_list": torch.zeros(4, dtype=torch.int32)}),
        ("group_list has 3 entries for 4", {"group_list": torch.zeros(3, dtype=torch.int64)}),
        ("group_list_type 2", {"group_list_type": 2}),
        ("one entry with group_list_type 1", {"weight": torch.zeros(1, 32, 16).half(),
                                              "group_list": torch.zeros(1, dtype=torch.int64),
                                              "group_list_type": 1}),
        ("1025 groups, at most 1024", {"weight": torch.zeros(1025, 32, 16).half(),
                                       "group_list": torch.zeros(1025, dtype=torch.int64)}),
        ("act_type 5", {"act_type": 5}),
        ("do not multiply", {"weight": torch.zeros(4, 31, 16).half()}),
        ("scale is not emulated", {"scale": torch.zeros(4, 16)}),
    ],
)  # fmt: skip
def test_grouped_products_refuse(rule, changes):
    call = {
        "weight": torch.zeros(4, 32, 16).half(),
        "group_list": torch.zeros(4, dtype=torch.int64),
        "split_item": 2,
        "group_type": 0,
    } | changes
    call = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    for name in ("bias", "scale"):
        if name in call:
            call[name] = [call[name]]
    x = torch.zeros(5, 32).half().npu()
    refused(rule, lambda: torch_npu.npu_grouped_matmul([x], [call.pop("weight")], **call))


def test_float32_products_need_one_weight():
    x, w, groups = torch.zeros(5, 32).npu(), torch.zeros(32, 8).npu(), torch.tensor([1, 5]).npu()
    refused(
        "float32 needs",
        lambda: torch_npu.npu_grouped_matmul(
            [x], [w, w], group_list=groups, split_item=2, group_type=0
        ),
    )
