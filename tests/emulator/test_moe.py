"""Operators of mixture-of-experts layers are compared with plain torch; the operators refuse
arguments that their documents exclude.
"""

import json

import pytest
import torch
import torch_npu
from paged import TOLERANCE

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(got: torch.Tensor, want: torch.Tensor, scale: float = 1) -> None:
    tolerance = TOLERANCE[got.dtype] * scale
    assert torch.allclose(got.cpu().float(), want.float(), atol=tolerance, rtol=tolerance)


def refused(rule, call):
    with pytest.raises(RuntimeError) as error:
        call()
    assert rule in str(error.value)


# ---- gating


def gate(x, k, bias=None, groups=1, kept=1, by_two=False, sigmoid=True, scale=1.0):
    """Return the weights, the chosen experts and all scores, in float32."""
    scores = x.float().sigmoid() if sigmoid else x.float().softmax(-1)
    order = scores if bias is None else scores + bias.float()
    grouped = order.view(len(x), groups, -1)
    worth = grouped.topk(2).values.sum(-1) if by_two else grouped.amax(-1)
    best = torch.zeros_like(worth).scatter(1, worth.topk(kept).indices, 1).bool()
    order = grouped.masked_fill(~best[..., None], -torch.inf).flatten(1)
    chosen = order.topk(k).indices
    weights = scores.gather(1, chosen)
    if sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen, scores


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(
    "experts,k,groups,kept,by_two,biased",
    [
        (8, 2, 1, 1, False, False),
        (64, 6, 1, 1, False, True),
        (256, 8, 8, 4, True, True),
        (32, 4, 4, 2, False, True),
        (12, 6, 4, 2, True, False),
    ],
)
def test_gating(dtype, sigmoid, experts, k, groups, kept, by_two, biased):
    x = torch.randn(7, experts).to(dtype)
    # The values are far apart, so that rounding cannot change the choice.
    bias = (torch.randperm(experts).float() * 2 / experts).to(dtype) if biased else None

    weights, chosen, scores = torch_npu.npu_moe_gating_top_k(
        x.npu(),
        k,
        bias=None if bias is None else bias.npu(),
        k_group=kept,
        group_count=groups,
        group_select_mode=int(by_two),
        norm_type=int(sigmoid),
        out_flag=True,
        routed_scaling_factor=2.5,
    )

    want, want_chosen, want_scores = gate(x, k, bias, groups, kept, by_two, sigmoid, 2.5)
    assert weights.dtype == dtype and chosen.dtype == torch.int32 and scores.dtype == torch.float32
    assert torch.allclose(scores.cpu(), want_scores, atol=1e-6)
    ties = want_scores.gather(1, chosen.cpu().long())
    assert torch.equal(chosen.cpu().long(), want_chosen) or torch.allclose(
        ties, want_scores.gather(1, want_chosen)
    )
    assert_close(weights, want, 2)


def test_gating_of_a_strided_input():
    x = torch.randn(16, 5)
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k(x.npu().t(), 3, norm_type=1)
    want, want_chosen, _ = gate(x.t(), 3)
    assert torch.equal(chosen.cpu().long(), want_chosen)
    assert_close(weights, want)


@pytest.mark.parametrize(
    "rule,experts,options",
    [
        ("2112 experts, at most 2048", 2112, {}),
        ("cannot be divided into group_count 3", 64, {"group_count": 3}),
        ("leaves 2 experts in a group", 64, {"group_count": 32, "k_group": 32}),
        ("padded to 32s they exceed 2048", 396, {"group_count": 99, "k_group": 99}),
        ("k_group 5 is not 1 to group_count 4", 64, {"group_count": 4, "k_group": 5}),
        ("k 6 is not 1 to 4", 16, {"group_count": 4}),
        ("renorm 1", 64, {"renorm": 1}),
        ("group_select_mode 2", 64, {"group_select_mode": 2}),
    ],
)
def test_gating_refuses(rule, experts, options):
    x = torch.zeros(2, experts).npu()
    refused(rule, lambda: torch_npu.npu_moe_gating_top_k(x, 6, **options))


# ---- routing


def sorted_by_expert(experts, first, end):
    """Return the flat positions of the choices of experts in the range, sorted by expert."""
    flat = experts.flatten().tolist()
    active = [i for i, e in enumerate(flat) if first <= e < end]
    return sorted(active, key=lambda i: flat[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("first,end", [(0, 8), (2, 5)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_routing(dtype, first, end, kind):
    x = (torch.randn(9, 16) * 9).to(dtype)
    experts = torch.rand(9, 8).topk(3).indices.int()
    experts[experts == 4] = 3  # so that one expert has no token
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
    want[5, :4] = torch.tensor([127, 3, -3, 2])  # halves are rounded away from zero
    assert rows.dtype == torch.int8 and rows.shape == (27, 64)
    assert torch.allclose(scales[: len(order)].cpu(), step[source])
    difference = (rows[: len(order)].cpu() - want[source]).abs()
    assert (difference <= 0.57).all()  # at most 1 / 16 is cut from a quotient
    fives = (source == 5).nonzero().flatten()
    assert torch.equal(rows.cpu()[fives, :4], want[5, :4].char().expand(len(fives), -1))
    if dtype != torch.float32:  # the separate operator rounds other halves, and cuts nothing
        separate, _ = torch_npu.npu_dynamic_quant(x.npu())
        steps = rows[: len(order)].cpu().int() - separate.cpu()[source].int()
        assert steps.abs().max() <= 1


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
    else:  # negative ids come first; the kernel writes no counts, so new memory keeps its -1
        assert index == [7, 4, 0, 1, 6, 5, 2, 3] and counts == [-1] * 3
        assert rows == [[2, 3], [2, 3], [6, 7], [6, 7]]


# ---- products


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


# ---- adding up


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("extras", [True, False])
def test_finalize_routing(dtype, mode, extras):
    tokens, k, columns, experts = 6, 3, 16, 5
    rows = torch.randn(tokens * k, columns).to(dtype)
    scales = torch.rand(tokens, k).to(dtype)
    index = torch.randperm(tokens * k).view(tokens, k).int()
    if mode % 2:
        index[2, 1] = index[5, 0] = -1
    chosen = torch.randint(experts, (tokens, k)).int()
    skips = [torch.randn(tokens, columns).to(dtype) for _ in range(2)]
    bias = torch.randn(experts if mode % 2 == 0 else 1, columns).to(dtype)

    flat = index.flatten() if mode >= 2 else index.t().flatten()
    if mode % 2:  # [experts, capacity, columns]
        bias, rows_in = torch.randn(experts, columns).to(dtype), rows.view(1, -1, columns)
        rows_in = torch.cat([rows, torch.zeros(2, columns).to(dtype)]).view(experts, 4, columns)
    else:
        rows_in = rows
    out = torch_npu.npu_moe_finalize_routing(
        rows_in.npu(),
        skips[0].npu() if extras else None,
        skips[1].npu() if extras else None,
        bias.npu() if extras else None,
        scales.npu(),
        flat.contiguous().npu(),
        chosen.npu() if extras else None,
        drop_pad_mode=mode,
    )

    parts = rows.float()[index.long()]
    if extras:
        parts = parts + bias.float()[chosen.long()]
    parts = parts.masked_fill(index[..., None] == -1, 0)
    want = (parts * scales.float()[..., None]).sum(1)
    if extras:
        want = want + skips[0].float() + skips[1].float()
    assert_close(out, want, 2)


def test_finalize_routing_without_scales_moves_rows():
    rows, index = torch.randn(7, 16), torch.randperm(7).int()
    out = torch_npu.npu_moe_finalize_routing(
        rows.npu(), None, None, None, None, index.npu(), None, drop_pad_mode=2
    )
    assert torch.equal(out.cpu(), rows[index.long()])


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("must have 3 dimensions with drop_pad_mode 1", {"drop_pad_mode": 1}),
        ("drop_pad_mode 4", {"drop_pad_mode": 4}),
        ("has 5 rows, expanded_src_to_dst_row 6", {"rows": torch.zeros(5, 16)}),
        ("skip2 is given without skip1", {"skip2": torch.zeros(3, 16)}),
        ("skip1 must be Float", {"skip1": torch.zeros(3, 16).half()}),
        ("skip1 of shape [3, 8]", {"skip1": torch.zeros(3, 8)}),
        ("scales must be Float", {"scales": torch.zeros(3, 2).half()}),
        ("bias needs expert_for_source_row", {"bias": torch.zeros(4, 16)}),
        ("must be int32 of rank 1", {"index": torch.zeros(6, dtype=torch.int64)}),
    ],
)
def test_finalize_routing_refuses(rule, changes):
    call = {
        "rows": torch.zeros(6, 16),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": torch.zeros(3, 2),
        "index": torch.zeros(6, dtype=torch.int32),
        "experts": None,
        "drop_pad_mode": 0,
    } | changes
    call = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    mode = call.pop("drop_pad_mode")
    refused(rule, lambda: torch_npu.npu_moe_finalize_routing(*call.values(), drop_pad_mode=mode))


# ---- a layer

EXPERTS, CHOICES, HIDDEN, INNER = 8, 3, 32, 48


class Layer:
    """A layer of experts, computed by the operators, and by a sum over all experts in float32."""

    def __init__(self, dtype):
        self.gate_up = (torch.randn(EXPERTS, HIDDEN, 2 * INNER) / 6).to(dtype)
        self.down = (torch.randn(EXPERTS, INNER, HIDDEN) / 7).to(dtype)
        self.bias = torch.randn(EXPERTS) / 4
        self.on_device = [t.npu() for t in (self.gate_up, self.down, self.bias)]

    def __call__(self, x, logits, first=0, end=EXPERTS):
        gate_up, down, bias = self.on_device
        weights, chosen, _ = torch_npu.npu_moe_gating_top_k(
            logits, CHOICES, bias=bias, norm_type=1, routed_scaling_factor=1.5
        )
        rows, index, tokens, _ = torch_npu.npu_moe_init_routing_v2(
            x,
            chosen,
            active_num=x.shape[0] * CHOICES,
            expert_num=EXPERTS,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[first, end],
        )
        products = {
            "group_list": tokens,
            "group_list_type": 1,
            "split_item": 2,
            "group_type": 0,
        }
        (inner,) = torch_npu.npu_grouped_matmul([rows], [gate_up[first:end]], **products)
        (rows,) = torch_npu.npu_grouped_matmul(
            [torch_npu.npu_swiglu(inner)], [down[first:end]], **products
        )
        # All rows choose one expert, so no choice can be -1 (an expert of another rank).
        return torch_npu.npu_moe_finalize_routing(
            rows[None], None, None, None, weights.to(x.dtype), index, None, drop_pad_mode=3
        )

    def reference(self, x, logits, first=0, end=EXPERTS):
        weights, chosen, _ = gate(logits, CHOICES, self.bias, scale=1.5)
        dense = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)
        out = torch.zeros(len(x), HIDDEN)
        for e in range(first, end):
            left, right = (x.float() @ self.gate_up[e].float()).chunk(2, -1)
            inner = torch.nn.functional.silu(left) * right
            out += dense[:, e, None] * (inner @ self.down[e].float())
        return out


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_layer_is_the_weighted_sum_of_its_experts(dtype):
    layer, x, logits = Layer(dtype), torch.randn(10, HIDDEN).to(dtype), torch.randn(10, EXPERTS)
    assert_close(layer(x.npu(), logits.npu()), layer.reference(x, logits), 2)


def test_parts_of_a_layer_add_up():
    layer, x, logits = Layer(torch.float32), torch.randn(10, HIDDEN), torch.randn(10, EXPERTS)
    parts = [layer(x.npu(), logits.npu(), *part).cpu() for part in [(0, 3), (3, 8)]]
    assert_close(parts[1], layer.reference(x, logits, 3, 8))
    assert_close(parts[0] + parts[1], layer.reference(x, logits), 3)


def test_a_captured_layer_routes_what_it_is_given_at_replay():
    layer = Layer(torch.bfloat16)
    x = torch.zeros(10, HIDDEN).bfloat16().npu()
    logits = torch.zeros(10, EXPERTS).npu()
    layer(x, logits)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = layer(x, logits)
    for _ in range(3):
        new_x, new_logits = torch.randn(10, HIDDEN).bfloat16(), torch.randn(10, EXPERTS)
        x.copy_(new_x)
        logits.copy_(new_logits)
        graph.replay()
        assert_close(out, layer.reference(new_x, new_logits), 2)
