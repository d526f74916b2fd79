"""Operators that sort rows by their chosen experts are compared with plain torch."""

import json

import pytest
import torch
import torch_npu

from tests.emulator.compare import refused


def sorted_by_expert(experts, first, end):
    """Return the flat indices of all choices of the experts from ``first`` to ``end``, sorted by
    expert.
    """
    flat = experts.flatten().tolist()
    active = [i for i, e in enumerate(flat) if first <= e < end]
    return sorted(active, key=lambda i: flat[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("first,end", [(0, 8), (2, 5)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_routing(dtype, first, end, kind):
    x = (torch.randn(9, 16) * 9).to(dtype)
    experts = torch.rand(9, 8).topk(3).indices.int()
    experts[experts == 4] = 3  # now no token chooses expert 4
    scale = torch.rand(9)

    rows, index, tokens, scales = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        scale=scale.npu(),
        active_num=27,
        expert_num=8,
        active_expert_range=[first, end],
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=True,
    )

    order = sorted_by_expert(experts, first, end)
    source = torch.tensor(order) // 3
    assert rows.shape == (27, 16) and torch.equal(rows[: len(order)].cpu(), x[source])
    assert torch.equal(scales[: len(order)].cpu(), scale[source])
    want = torch.full((27,), -1, dtype=torch.int32)
    want[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(index.cpu(), want)
    counts = experts.flatten().long().bincount(minlength=8)[first:end]
    pairs = [[first + i, n] for i, n in enumerate(counts.tolist()) if n]
    expected = [counts.cumsum(0), counts, torch.tensor([*pairs, [0, 0]])][kind]
    assert torch.equal(tokens.cpu()[: len(expected)], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routing_with_quantisation(dtype):
    x, experts = torch.randn(9, 64).to(dtype), torch.rand(9, 8).topk(3).indices.int()
    x[4] = 0
    x[5, :4] = torch.tensor([127.0, 2.5, -2.5, 2.4])
    x[5, 4:] = 0

    rows, _, _, scales = torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=8, active_expert_range=[2, 7], quant_mode=1
    )

    order = sorted_by_expert(experts, 2, 7)
    source = torch.tensor(order) // 3
    step = x.float().abs().amax(-1) / 127
    want = torch.where(step[:, None] > 0, x.float() / step[:, None], 0.0)
    want[5, :4] = torch.tensor([127, 3, -3, 2])  # values like 2.5 are rounded away from zero
    assert rows.dtype == torch.int8 and rows.shape == (27, 64)
    assert torch.allclose(scales[: len(order)].cpu(), step[source])
    difference = (rows[: len(order)].cpu() - want[source]).abs()
    assert (difference <= 0.57).all()  # the operator cuts at most 1 / 16 from a quotient
    fives = (source == 5).nonzero().flatten()
    assert torch.equal(rows.cpu()[fives, :4], want[5, :4].char().expand(len(fives), -1))
    if dtype != torch.float32:  # the separate operator rounds values like 2.5 to even
        separate, _ = torch_npu.npu_dynamic_quant(x.npu())
        steps = rows[: len(order)].cpu().int() - separate.cpu()[source].int()
        assert steps.abs().max() <= 1


def test_routing_of_strided_rows():
    x, experts = torch.randn(9, 32), torch.rand(9, 8).topk(6).indices.int()

    rows, index, _, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu()[:, :16], experts.npu()[:, ::2], expert_num=8, active_expert_range=[0, 8]
    )

    order = sorted_by_expert(experts[:, ::2], 0, 8)
    assert torch.equal(rows.cpu(), x[torch.tensor(order) // 3, :16])
    assert torch.equal(index.cpu()[order].long(), torch.arange(27))


def test_routing_with_scatter_indices():
    x, experts = torch.randn(9, 16), torch.rand(9, 8).topk(3).indices.int()
    rows, index, _, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        expert_num=8,
        active_expert_range=[0, 8],
        row_idx_type=1,
        active_num=5,
    )
    order = torch.tensor(sorted_by_expert(experts, 0, 8))
    assert torch.equal(index.cpu().long(), order)
    assert torch.equal(rows.cpu(), x[order[:5] // 3])


def test_routing_with_capacity():
    x, experts = torch.randn(5, 16), torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2], [3, 2]]).int()
    rows, index, tokens, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        expert_num=4,
        active_expert_range=[0, 4],
        drop_pad_mode=1,
        expert_capacity=3,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
    )
    assert rows.shape == (4, 3, 16)
    want = torch.zeros(4, 3, 16)
    for expert, sources in enumerate([[0, 2], [1, 3], [0, 1, 2], [4]]):
        want[expert, : len(sources)] = x[sources]
    assert torch.equal(rows.cpu(), want)
    assert index.cpu().tolist() == [0, 6, 7, 3, 8, 1, 4, -1, 9, -1]
    assert tokens.cpu().tolist() == [2, 2, 5, 1]


@pytest.mark.parametrize(
    "rule,options",
    [
        ("active_expert_range 3 9", {"active_expert_range": [3, 9]}),
        ("active_expert_range 3 3", {"active_expert_range": [3, 3]}),
        ("at most 10240", {"expert_num": 10241}),
        ("at most 10240 (5120", {"expert_num": 5121, "expert_tokens_num_type": 2}),
        ("quant_mode 0 is not emulated", {"quant_mode": 0}),
        ("with quant_mode 1 are not emulated", {"quant_mode": 1, "scale": torch.zeros(8, 16)}),
        ("row_idx_type 2", {"row_idx_type": 2}),
        ("active_num -2", {"active_num": -2}),
        ("expert_capacity 0", {"drop_pad_mode": 1, "expert_capacity": 0}),
        ("must be less than the 2 rows", {"drop_pad_mode": 1, "expert_capacity": 2}),
        ("one for each row of x", {"scale": torch.zeros(3)}),
        ("expert_idx must be int32", {"expert_idx": torch.zeros(2, 3, dtype=torch.int64)}),
        ("must have the same rows", {"expert_idx": torch.zeros(3, 3, dtype=torch.int32)}),
    ],
)
def test_routing_refuses(rule, options):
    call = {"expert_idx": torch.zeros(2, 3, dtype=torch.int32), "expert_num": 8}
    call |= {"active_expert_range": [0, 8]} | options
    call = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    x = torch.zeros(2, 16).npu()
    refused(rule, lambda: torch_npu.npu_moe_init_routing_v2(x, call.pop("expert_idx"), **call))


ROUTE = """
x, ids = torch.arange(8.).view(4, 2), torch.tensor([[2, 0], [-1, -1], [1, 0], [-1, -1]]).int()
rows, index, counts, _ = torch_npu.npu_moe_init_routing_v2(
    x.npu(), ids.npu(), active_num=8, expert_num=3, active_expert_range=[0, 3],
    expert_tokens_num_type=1, expert_tokens_num_flag=True, row_idx_type=0)
print("ROUTED", json.dumps([index.tolist(), counts.tolist(), rows[:4].tolist()]))
"""


def test_ids_below_zero_are_refused_by_name(run_script):
    status, output = run_script(ROUTE)
    assert status == 1 and "expert_idx -1 is not 0 to expert_num - 1, 2" in output


@pytest.mark.parametrize("cann", ["8.5.0", "9.0.0"])
def test_without_strictness_ids_below_zero_do_what_the_kernel_does(run_script, cann):
    status, output = run_script(ROUTE, strict=False, cann=cann)
    assert status == 0, output
    index, counts, rows = json.loads(output.partition("ROUTED ")[2])
    if cann == "8.5.0":  # negative ids are left out
        assert index == [3, 0, -1, -1, 2, 1, -1, -1] and counts == [2, 1, 1]
    else:  # negative ids are sorted first; counts keep the value -1, because the kernel writes none
        assert index == [7, 4, 0, 1, 6, 5, 2, 3] and counts == [-1] * 3
        assert rows == [[2, 3], [2, 3], [6, 7], [6, 7]]


@pytest.mark.parametrize("kernels", ["skip", "timed"])
def test_without_arithmetic_ids_are_not_checked(run_script, kernels):
    """Ranks exchange expert ids and rows in one tensor. If the emulator skips arithmetic, this
    tensor contains no valid ids.
    """
    status, output = run_script(ROUTE, kernels=kernels)
    assert status == 0 and "ROUTED" in output, output
