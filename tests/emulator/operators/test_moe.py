"""Operators of mixture-of-experts layers are compared with plain torch. The operators refuse
arguments that their documents exclude.
"""

import pytest
import torch
import torch_npu

from tests.emulator.compare import FLOATS, assert_close, refused

# ---- gating


def gate(x, k, bias=None, groups=1, kept=1, by_two=False, sigmoid=True, scale=1.0):
    """Return the weights of the chosen experts, their ids, and the scores of all experts, in
    float32.
    """
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
    # The biases differ so much that rounding cannot change the choice of experts.
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
    """A layer of experts. The operators compute it. The reference is a sum over all experts in
    float32.
    """

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
        # Mode 3 allows the index -1, which here stands for an expert of another rank. In this mode,
        # the rows have the shape [experts, rows, hidden]; the test uses one expert.
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
