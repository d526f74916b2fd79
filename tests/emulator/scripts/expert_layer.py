"""Every rank runs this script. It computes a layer of experts with each kind of exchange.

The script compares the results with a float32 computation on the CPU, in which every expert
computes every token.

The script prints one JSON object: the errors of each check, and digests of the captures. A failed
check raises no exception, so that this rank still runs the same collectives as the others.
Arguments: tp dp [algorithm of MC2]. If an algorithm is given, the script tests only the exchange by
MC2.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dist_aclgraph.comm.groups import make_groups
from dist_aclgraph.graphs.digest import OperatorDigest
from dist_aclgraph.layers.experts import ExpertLayer, ExpertStep
from dist_aclgraph.layers.int8_products import Int8GroupedProduct, Int8Linear
from dist_aclgraph.layers.linear import Linear
from dist_aclgraph.layers.local_experts import ActivatedProduct, GroupedProduct, LocalExperts
from dist_aclgraph.layers.router import Router
from dist_aclgraph.layers.shared_experts import SharedExperts, SideStream
from dist_aclgraph.layers.token_exchange import make_exchanges
from dist_aclgraph.models.int8_weights import quantise
from dist_aclgraph.planning.exchange import expert_capacity
from dist_aclgraph.planning.mc2 import MC2_OPERATORS
from dist_aclgraph.topology import ParallelLayout

TP, DP = int(sys.argv[1]), int(sys.argv[2])
EP = TP * DP
HIDDEN, WIDTH, EXPERTS, K = 64, 32, 8, 3
ALGORITHM = sys.argv[3] if len(sys.argv) > 3 else "fullmesh"
MC2 = next(p for p in MC2_OPERATORS if p.name == "A2" and p.algorithm == ALGORITHM)
KINDS = ("all_gather", "all_to_all", "mc2") if len(sys.argv) == 3 else ("mc2",)
# For each batch: the number of rows, and the number of live tokens on each data-parallel rank (all
# rows, some of them, or none). Only some of these numbers of rows are multiples of tp.
BATCHES = [(6, (6, 4)), (5, (1, 5)), (7, (3, 0)), (1, (1, 0))]

dist.init_process_group("hccl")
rank = dist.get_rank()
groups = make_groups(ParallelLayout(tp=TP, dp=DP, ep=EP, mc2=True), rank)
tp, ep = groups.tp, groups.ep
problems: dict[str, list[str]] = {}
digests: dict[str, str] = {}
lanes: dict[str, list[int]] = {}


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ROUTER = random(1, EXPERTS, HIDDEN)
GATE, UP = (random(seed, EXPERTS, WIDTH, HIDDEN).half() / HIDDEN**0.5 for seed in (2, 3))
DOWN = random(4, EXPERTS, HIDDEN, WIDTH).half() / WIDTH**0.5
SHARED_GATE, SHARED_UP = (random(seed, WIDTH, HIDDEN).half() / HIDDEN**0.5 for seed in (5, 6))
SHARED_DOWN = random(7, HIDDEN, WIDTH).half() / WIDTH**0.5


def place(t):
    return t.contiguous().npu()


def int8(weights):
    """Return quantised int8 layers, made from float weights [experts, out, in] or [out, in]."""
    pairs = [quantise(w.float()) for w in weights.reshape(-1, *weights.shape[-2:])]
    values, scales = (torch.stack(parts).transpose(1, 2) for parts in zip(*pairs, strict=True))
    if weights.dim() == 2:
        return Int8Linear(place(values[0]), place(scales.flatten()))
    return Int8GroupedProduct(place(values), place(scales.squeeze(1)))


def floats(weights):
    weights = place(weights.transpose(-1, -2))
    return Linear(weights) if weights.dim() == 2 else GroupedProduct(weights)


def make_layer(factor=4.0, with_shared=True, side=None, product=floats):
    local = EXPERTS // EP
    mine = slice(ep.rank * local, (ep.rank + 1) * local)
    part = slice(tp.rank * WIDTH // TP, (tp.rank + 1) * WIDTH // TP)
    experts = LocalExperts(
        ActivatedProduct(product(torch.cat([GATE[mine], UP[mine]], 1))),
        product(DOWN[mine]),
        mine.start,
        EXPERTS,
    )
    shared = SharedExperts(
        product(torch.cat([SHARED_GATE[part], SHARED_UP[part]])),
        product(SHARED_DOWN[:, part]),
        side,
    )
    return ExpertLayer(
        Router(place(ROUTER.t()), K, True),
        experts,
        groups,
        make_exchanges(groups, experts, factor, MC2),
        shared if with_shared else None,
    )


def batch(seed, n, live, dp_rank=None):
    """Return x [n, hidden] and slots [n] of a data-parallel rank. Rows from ``live`` on are padding
    with junk.
    """
    x = random(100 * seed + (groups.dp_rank if dp_rank is None else dp_rank), n, HIDDEN).half()
    slots = torch.arange(n, dtype=torch.int32)
    x[live:], slots[live:] = 100.0, -1
    return x, slots


def choices(x):
    weights, chosen = (x.float() @ ROUTER.t()).softmax(-1).topk(K)
    return weights / weights.sum(-1, keepdim=True), chosen


def mlp(x, gate, up, down):
    gate, up, down = gate.float(), up.float(), down.float()
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def dense(x, with_shared):
    x = x.float()
    weights, chosen = choices(x)
    out = mlp(x, SHARED_GATE, SHARED_UP, SHARED_DOWN) if with_shared else torch.zeros_like(x)
    for e in range(EXPERTS):
        out += (weights * (chosen == e)).sum(1, keepdim=True) * mlp(x, GATE[e], UP[e], DOWN[e])
    return out


def expect(what, is_so, told=""):
    problems.setdefault(what, [])
    if not is_so:
        problems[what].append(str(told))


def expect_dense(what, out, x, live, with_shared=True, tolerance=1e-2):
    got, want = out.cpu().float()[:live], dense(x[:live], with_shared)
    expect(what, out.shape == x.shape and bool(torch.isfinite(out.cpu()).all()), out.shape)
    is_close = torch.allclose(got, want, atol=tolerance, rtol=tolerance)
    expect(what, is_close, f"{live} rows of {len(x)}")


def expect_load(what, tally, total):
    """Check that ``tally`` has counted ``total`` tokens. An exchange without a mask also counts
    padding, so its tally is not checked.
    """
    if MC2.takes_mask:
        expect(what, tally.tolist() == [total, 0], f"{tally.tolist()} not {total}")


def new_tally():
    return torch.zeros(2, dtype=torch.int64).npu()


def load(seed, n, lives):
    """Return the load of this rank's experts: how often the tokens of all data-parallel ranks
    choose one of these experts.
    """
    counts = np.zeros(EXPERTS, np.int64)
    for dp_rank in range(DP):
        chosen = choices(batch(seed, n, lives[dp_rank], dp_rank)[0][: lives[dp_rank]])[1]
        counts += np.bincount(chosen.flatten().numpy(), minlength=EXPERTS)
    return counts.reshape(EP, -1).sum(1)[ep.rank]


def run_eagerly(kind):
    for with_shared in (True, False):
        layer = make_layer(with_shared=with_shared)
        for seed, (n, lives) in enumerate(BATCHES):
            tally, live = new_tally(), lives[groups.dp_rank]
            x, slots = batch(seed, n, live)
            out = layer(x.npu(), slots.npu(), ExpertStep(kind, tally))
            expect_dense(f"sum {kind}", out, x, live, with_shared)
            expect_load(f"load {kind}", tally, load(seed, n, lives))


def run_captured(kind):
    # Capture two layers in a row: the second layer may use memory that the first layer has freed.
    side, n, total = SideStream(), 5, 0
    layers = [make_layer(side=side), make_layer(side=side)]
    x, slots = (t.npu() for t in batch(0, n, n))
    tally = new_tally()
    step = ExpertStep(kind, tally)
    for layer in layers:
        layer(x, slots, step)
    torch.npu.synchronize()
    tally.zero_()
    graph = torch.npu.NPUGraph()
    with OperatorDigest() as digest, torch.npu.graph(graph):
        outs = [layer(x, slots, step) for layer in layers]
    digests[kind] = digest.hexdigest()
    lanes[kind] = count_entries(graph)
    for seed, lives in enumerate([(5, 2), (0, 5), (3, 3)], start=1):
        live = lives[groups.dp_rank]
        given = batch(seed, n, live)
        x.copy_(given[0])
        slots.copy_(given[1])
        graph.replay()
        for out in outs:
            expect_dense(f"replay {kind}", out, given[0], live)
        total += 2 * load(seed, n, lives)
        expect_load(f"replay {kind}", tally, total)


def count_entries(graph):
    """Return the number of operators on each lane of a graph, the main lane first."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        graph.debug_dump(file.name)
        nodes = json.loads(Path(file.name).read_text())
    found: dict[int, int] = {}
    for node in nodes:
        is_operator = node["name"].startswith("aclnn")
        lane = node["args"]["Stream Id"]
        found[lane] = found.get(lane, 0) + is_operator
    return list(found.values())


def run_beside(kind):
    plain, beside = make_layer(), make_layer(side=SideStream())
    for seed, (n, lives) in enumerate(BATCHES):
        x, slots = (t.npu() for t in batch(seed, n, lives[groups.dp_rank]))
        live = lives[groups.dp_rank]
        outs = [layer(x, slots, ExpertStep(kind))[:live].cpu() for layer in (plain, beside)]
        expect(f"overlap {kind}", torch.equal(*outs), "not the same bits")


def run_in_int8(kind):
    side, n = SideStream(), 6
    layer, alone = make_layer(side=side, product=int8), make_layer(product=int8)
    x, slots = (t.npu() for t in batch(0, n, n))
    layer(x, slots, ExpertStep(kind))
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = layer(x, slots, ExpertStep(kind))
    for seed, lives in enumerate([(6, 4), (1, 5), (0, 3)], start=1):
        live = lives[groups.dp_rank]
        given = batch(seed, n, live)
        x.copy_(given[0])
        slots.copy_(given[1])
        graph.replay()
        # Three quantisations, of inputs and of weights, add noise of about 1 % each. The results
        # have a standard deviation of 0.8. The tolerance allows for the largest error among
        # hundreds of results.
        expect_dense(f"int8 {kind}", out, given[0], live, tolerance=0.1)
        eager = alone(x, slots, ExpertStep(kind))
        expect(f"int8 {kind}", torch.equal(out[:live].cpu(), eager[:live].cpu()), "other bits")


def run_overflow():
    """Check a step in which all tokens of a rank choose the same experts, so that these experts get
    more tokens than their capacity.
    """
    layer, n, live = make_layer(factor=1.0), 96, 90
    x, slots = batch(0, n, live)
    x[:live] = x[0]
    tally, m = new_tally(), n // TP
    out = layer(x.npu(), slots.npu(), ExpertStep("all_to_all", tally))
    capacity = expert_capacity(m, EP, K, 1.0)
    # Number of live tokens in each rank's slice.
    sent = [min(m, max(0, live - r * m)) for r in range(TP)]
    num_ranks = len(set((choices(x[:1])[1] // (EXPERTS // EP)).flatten().tolist()))
    lost = num_ranks * max(0, sent[tp.rank] - capacity)
    expect("overflow", tally[1].item() == lost, f"{tally[1].item()} not {lost} of {capacity}")
    for r in range(TP):
        fitting = slice(r * m, r * m + min(sent[r], capacity))
        expect_dense("overflow", out[fitting], x[fitting], len(x[fitting]))
    total = tally.clone()
    dist.all_reduce(total)
    expect("overflow", total[1].item() > 0, "nothing overflowed anywhere")


for kind in KINDS:
    run_eagerly(kind)
    run_captured(kind)
    run_beside(kind)
    run_in_int8(kind)
run_overflow()
print("RESULT " + json.dumps({"problems": problems, "digests": digests, "lanes": lanes}))
