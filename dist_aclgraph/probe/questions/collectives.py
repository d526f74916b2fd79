"""HCCL between two ranks: sums, captures, streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dist_aclgraph.config.chips import generation_of
from dist_aclgraph.probe.question import (
    ACCEPTED,
    DIFFERENT,
    EQUAL,
    REFUSED,
    Answer,
    Bench,
    Between,
    ByCann,
    Level,
    Probe,
)
from dist_aclgraph.probe.questions.graphs import captured

COUNT = 300_000  # number of elements, larger than one chunk of HCCL's buffer
NUM_REPEATS = 20
TOLERANCE = 3e-2  # largest allowed difference for bfloat16


def _dist(bench: Bench) -> Any:
    return bench.torch.distributed


def _all_reduce(bench: Bench) -> Answer:
    x = bench.torch.full((COUNT,), bench.rank + 1.0, device="npu")
    _dist(bench).all_reduce(x)
    total = bench.ranks * (bench.ranks + 1) / 2
    return bench.compare(x, bench.torch.full((COUNT,), total))


def _all_gather(bench: Bench) -> Answer:
    torch = bench.torch
    out = torch.empty(bench.ranks * COUNT, device="npu")
    _dist(bench).all_gather_into_tensor(out, torch.full((COUNT,), float(bench.rank), device="npu"))
    return bench.compare(out, torch.arange(bench.ranks).float().repeat_interleave(COUNT))


def _reduce_scatter(bench: Bench) -> Answer:
    torch = bench.torch
    whole = torch.arange(bench.ranks * COUNT).float() % 97
    part = torch.empty(COUNT, device="npu")
    _dist(bench).reduce_scatter_tensor(part, whole.npu())
    mine = slice(bench.rank * COUNT, (bench.rank + 1) * COUNT)
    return bench.compare(part, whole[mine] * bench.ranks)


def _all_to_all(bench: Bench) -> Answer:
    torch = bench.torch
    out = torch.empty(bench.ranks * 5, device="npu")
    sent = torch.arange(bench.ranks).float().repeat_interleave(5) + 100 * bench.rank
    _dist(bench).all_to_all_single(out, sent.npu())
    want = (torch.arange(bench.ranks) * 100.0 + bench.rank).repeat_interleave(5)
    return bench.compare(out, want)


def _same_bits(bench: Bench) -> Answer:
    """Repeat a sum whose result depends on the order of the additions."""
    torch = bench.torch
    x = (torch.randn(COUNT) * 10 ** (bench.rank + 1)).bfloat16().npu()
    first = x.clone()
    _dist(bench).all_reduce(first)
    different = []
    for i in range(NUM_REPEATS):  # the loop does not end early, because each sum needs both ranks
        again = x.clone()
        _dist(bench).all_reduce(again)
        if not torch.equal(first.cpu(), again.cpu()):
            different.append(i)
    return Answer(DIFFERENT, f"repetitions {different}") if different else Answer(EQUAL)


def captured_sum(bench: Bench) -> tuple[Any, Any, Any]:
    """Return a graph, its input tensor and its output tensor.

    A replay sums the inputs of all ranks, multiplies the sum by two, and writes the product to the
    output tensor.
    """
    x, out = bench.torch.ones(64, device="npu"), bench.torch.zeros(64, device="npu")

    def step() -> None:
        y = x * 2
        _dist(bench).all_reduce(y)
        out.copy_(y)

    step()
    bench.synchronize()
    graph, _ = captured(bench, step)
    return graph, x, out


def _captured(bench: Bench) -> Answer:
    graph, x, out = captured_sum(bench)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        answer = bench.compare(out, bench.torch.full((64,), value * 2 * bench.ranks))
        if answer.found != EQUAL:
            break
    return answer


def mc2(
    bench: Bench,
    num_tokens: int = 6,
    hidden: int = 1024,
    num_experts: int = 8,
    top_k: int = 3,
    group: Any = None,
) -> Answer:
    """Send tokens to identity experts on all ranks, and add up the returned tokens.

    Args:
        group: the communicator of MC2's two operators; None means a new communicator.
    """
    torch = bench.torch
    own = _dist(bench).new_group(list(range(bench.ranks))) if group is None else group
    name = own._get_backend(torch.device("npu")).get_hccl_comm_name(bench.rank)
    domain = (name, bench.ranks, bench.rank, num_experts)
    is_a2 = generation_of(bench.npu.name) == "A2"  # an A2 also sends routing weights
    torch.manual_seed(bench.rank)
    x, weights = torch.randn(num_tokens, hidden).bfloat16(), torch.rand(num_tokens, top_k)
    experts = torch.rand(num_tokens, num_experts).topk(top_k).indices.int().npu()
    scales = weights.npu()
    rows, _, origins, _, counts, _, row_scales = bench.ops.npu_moe_distribute_dispatch_v2(
        x.npu(),
        experts,
        *domain,
        expert_token_nums_type=0,
        expert_scales=scales if is_a2 else None,
    )
    got = bench.ops.npu_moe_distribute_combine_v2(
        rows,
        experts,
        origins,
        counts,
        scales,
        *domain,
        expand_scales=row_scales if is_a2 else None,
    )
    return bench.compare(got, x.float() * weights.sum(-1, keepdim=True), TOLERANCE)


def _mc2_on_a_used_group(bench: Bench) -> Answer:
    """Send tokens by MC2 over a communicator that has run a collective."""
    own = _dist(bench).new_group(list(range(bench.ranks)))
    _dist(bench).all_reduce(bench.torch.ones(64, device="npu"), group=own)
    bench.synchronize()
    return mc2(bench, group=own)


def _streams_of_a_domain(bench: Bench) -> float:
    x = bench.torch.ones(64, device="npu")
    bench.torch.npu.synchronize()
    before = bench.npu.available_streams()
    _dist(bench).all_reduce(x)
    bench.torch.npu.synchronize()
    return float(before - bench.npu.available_streams())


def _accepts(bench: Bench, call: Callable[[Bench], Answer]) -> str:
    call(bench)
    return ACCEPTED


def _equal(
    name: str, question: str, call: Callable[[Bench], Answer], level: Level = "full"
) -> Probe:
    return Probe(f"collectives.{name}", question, call, EQUAL, level, ranks=2)


PROBES = (
    _equal("all_reduce", "Is an all-reduce of 2 ranks right?", _all_reduce, "quick"),
    Probe(
        "collectives.all_reduce_of_4",
        "Is an all-reduce of 4 ranks right?",
        _all_reduce,
        EQUAL,
        ranks=4,
    ),
    _equal("all_gather", "Is an all-gather of 2 ranks right?", _all_gather),
    _equal("reduce_scatter", "Is a reduce-scatter of 2 ranks right?", _reduce_scatter),
    _equal("all_to_all", "Is an all-to-all of 2 ranks right?", _all_to_all),
    _equal("same_bits", "Does a repeated sum give the same bits?", _same_bits),
    _equal("captured", "Is an all-reduce in a graph right?", _captured),
    Probe(
        "collectives.mc2",
        "Do tokens travel to experts and back by MC2?",
        mc2,
        ByCann(EQUAL, EQUAL, a2_cann_8=REFUSED),  # an A2 allows only 8, 16, ... ranks
        ranks=2,
    ),
    Probe(
        "collectives.mc2_of_4",
        "Do they with 4 ranks?",
        mc2,
        ByCann(EQUAL, EQUAL, a2_cann_8=REFUSED),
        ranks=4,
    ),
    *(
        Probe(
            f"rules.mc2_{name}",
            f"Does MC2 accept {what}?",
            partial(_accepts, call=call),
            REFUSED,
            ranks=2,
            rule=rule,
        )
        for name, what, call, rule in (
            ("hidden_8224", "rows of 8224 elements", partial(mc2, hidden=8224), "H 8224 "),
            (
                "top_k_17",
                "17 experts for each token",
                partial(mc2, num_experts=32, top_k=17),
                "K 17 ",
            ),
            ("rows_513", "513 tokens", partial(mc2, num_tokens=513), "BS 513 "),
            ("experts_1026", "1026 experts", partial(mc2, num_experts=1026), "moe_expert_num 1026"),
            (
                "used_group",
                "a communicator that has run a collective",
                _mc2_on_a_used_group,
                None,
            ),
        )
    ),
    Probe(
        "collectives.streams",
        "How many streams does the first collective take, with torch_npu's own?",
        _streams_of_a_domain,
        Between(1, 64, "streams"),
        ranks=2,
    ),
)
