"""Compares operators with the host, at the shapes of published models.

The operators are called with ``torch.ops.npu``, as in the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_aclgraph.probe.question import DIFFERENT, EQUAL, Answer, Bench, Probe
from dist_aclgraph.probe.questions.operators import (
    BFLOAT16,
    BLOCK,
    DIM,
    FLOAT32,
    LATENT,
    ROTATED,
    attention,
    attention_arguments,
    attention_on_host,
    blocks_in_order,
)

MANY = 24  # number of requests in a decode step
LONG = [1, 127, 1024, 4096]  # KV lengths
EPSILON = 1e-6
ROUTED = 2.5  # factor by which DeepSeek-V3 multiplies routing weights
NUM_DRAWS, NUM_ROUNDS, NUM_TOKENS = 1_000_000, 10, 16
MAX_CHI_SQUARE = 44.3  # the statistic of correct draws exceeds this value once in 10,000 tests
EXPERTS, CHOSEN, GROUPS, KEPT_GROUPS = 256, 8, 8, 4  # as in DeepSeek-V3


def _random(bench: Bench, *shape: int) -> Any:
    return bench.torch.randn(*shape).bfloat16()


def _decode_of_one_head(bench: Bench) -> Answer:
    """Decode with one KV head and 8 query heads, as on each rank of Qwen3-235B with tp 8."""
    lengths = (LONG * MANY)[:MANY]
    query = _random(bench, MANY, 8, DIM)
    keys, values = (_random(bench, MANY * LONG[-1] // BLOCK, BLOCK, 1, DIM) for _ in range(2))
    got = attention(bench, query.npu(), keys.npu(), values.npu(), lengths)
    return bench.compare(got, attention_on_host(bench, query, keys, values, lengths), BFLOAT16)


def _masked_decode(bench: Bench) -> Answer:
    """Decode as with ``graph.updates: none``: the operator reads the same number of keys for all
    requests, and a mask hides the keys that a request does not have.
    """
    torch, num_keys = bench.torch, LONG[-1]
    query = _random(bench, len(LONG), 8, DIM)
    shape = len(LONG) * num_keys // BLOCK, BLOCK, 1, DIM
    keys, values = (_random(bench, *shape) for _ in range(2))
    table = blocks_in_order(bench, keys, len(LONG))
    lengths = [num_keys] * len(LONG)
    arguments = attention_arguments(query.npu(), keys.npu(), values.npu(), lengths, table)
    del arguments["actual_seq_lengths"]
    hidden = torch.arange(num_keys) >= torch.tensor(LONG).view(-1, 1, 1, 1)
    changes = {"query": query.npu().unsqueeze(1), "atten_mask": hidden.npu()}
    got = bench.ops.npu_fused_infer_attention_score(
        **arguments | changes | {"input_layout": "BSND"}
    )[0].squeeze(1)
    return bench.compare(got, attention_on_host(bench, query, keys, values, LONG), BFLOAT16)


def _angles(bench: Bench, count: int) -> tuple[Any, Any]:
    """Return cos and sin. Both are [count, 1, 1, 64] with two equal halves, as in rotary tables."""
    half = bench.torch.randn(count, 1, 1, ROTATED // 2)
    both = bench.torch.cat([half, half], -1)
    return both.cos().bfloat16(), both.sin().bfloat16()


def _rotated_pairs(bench: Bench, x: Any, cos: Any, sin: Any) -> Any:
    """Rotate pairs of neighbouring elements. The result contains the first elements of all pairs,
    then the second elements of all pairs.
    """
    even, odd = x.float()[..., ::2], x.float()[..., 1::2]
    cos, sin = (t.float()[..., : ROTATED // 2] for t in (cos, sin))
    return bench.torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def _interleave_rope(bench: Bench) -> Answer:
    x, (cos, sin) = _random(bench, 16, 8, 1, ROTATED), _angles(bench, 16)
    got = bench.torch.ops.npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu())
    return bench.compare(got, _rotated_pairs(bench, x, cos, sin), BFLOAT16)


def _latent_write(bench: Bench) -> Answer:
    """Normalise and rotate three rows, and write them to the cache. One row has slot -1."""
    torch = bench.torch
    rows, gamma = _random(bench, 3, 1, 1, LATENT + ROTATED), _random(bench, LATENT)
    cos, sin = _angles(bench, 3)
    latents, rope_keys = (torch.zeros(4, BLOCK, 1, d).bfloat16() for d in (LATENT, ROTATED))
    caches = rope_keys.npu(), latents.npu()
    slots = torch.tensor([5, -1, 3 * BLOCK])
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        rows.npu(),
        gamma.npu(),
        cos.npu(),
        sin.npu(),
        slots.npu(),
        *caches,
        epsilon=EPSILON,
        cache_mode="PA",
    )
    f = rows.float().flatten(0, 2)
    x = f[:, :LATENT]
    normed = x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * gamma.float()
    turned = _rotated_pairs(bench, rows[..., LATENT:], cos, sin).flatten(0, 2)
    want = torch.zeros(4 * BLOCK, LATENT), torch.zeros(4 * BLOCK, ROTATED)
    for slot, row in ((5, 0), (3 * BLOCK, 2)):
        want[0][slot], want[1][slot] = normed[row], turned[row]
    found = bench.compare(caches[0].view(-1, ROTATED), want[1], BFLOAT16)
    if found.found != EQUAL:
        return found
    return bench.compare(caches[1].view(-1, LATENT), want[0], BFLOAT16)


def _absorb(bench: Bench) -> Answer:
    q, keys = _random(bench, MANY, 8, DIM), _random(bench, 8, DIM, LATENT) / 12
    got = bench.torch.ops.npu.npu_transpose_batchmatmul(
        q.npu(), keys.npu(), perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    want = bench.torch.einsum("nhd,hdk->nhk", q.float(), keys.float())
    return bench.compare(got, want, BFLOAT16)


def _gating_by_groups(bench: Bench) -> Answer:
    torch = bench.torch
    logits, bias = torch.randn(MANY, EXPERTS), torch.randn(EXPERTS) / 4
    weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.npu(),
        k=CHOSEN,
        bias=bias.npu(),
        k_group=KEPT_GROUPS,
        group_count=GROUPS,
        group_select_mode=1,
        norm_type=1,
        routed_scaling_factor=ROUTED,
    )
    scores = logits.sigmoid()
    compared = (scores + bias).view(MANY, GROUPS, -1)
    kept = compared.topk(2, -1).values.sum(-1).topk(KEPT_GROUPS, -1).indices
    hidden = torch.ones(MANY, GROUPS, dtype=torch.bool).scatter_(1, kept, False)
    want = compared.masked_fill(hidden[..., None], -1e9).flatten(1).topk(CHOSEN, -1).indices
    chosen = bench.compare(experts, want)
    if chosen.found != EQUAL:
        return chosen
    mine = scores.gather(1, want)
    return bench.compare(weights, mine / mine.sum(-1, keepdim=True) * ROUTED, FLOAT32)


def _int8_experts(bench: Bench) -> Answer:
    """Multiply int8 rows by four experts, one of them without rows. The hidden size is
    DeepSeek-V3's.
    """
    torch, sizes = bench.torch, [3, 0, 9, 4]
    x = torch.randint(-127, 128, (16, 7168), dtype=torch.int8)
    weight = torch.randint(-127, 128, (4, 7168, 256), dtype=torch.int8)
    scale, rows = (torch.rand(4, 256) * 1e-3).bfloat16(), torch.rand(16) * 1e-3
    got = torch.ops.npu.npu_grouped_matmul(
        [x.npu()],
        [weight.npu()],
        group_list=torch.tensor(sizes).npu(),
        group_list_type=1,
        group_type=0,
        split_item=3,
        scale=[scale.npu()],
        per_token_scale=[rows.npu()],
        output_dtype=torch.bfloat16,
    )[0]
    parts = zip(x.float().split(sizes), weight.float(), scale.float(), strict=True)
    want = torch.cat([part @ w * s for part, w, s in parts]) * rows[:, None]
    return bench.compare(got, want, BFLOAT16)


def _routing_of_padding(bench: Bench) -> Answer:
    """Sort tokens by expert, on the second of two ranks.

    The expert id of padding is the number of experts. No expert has this id.
    """
    torch, num_experts = bench.torch, 8
    experts = torch.tensor([[4, 0], [7, 4], [8, 8]], dtype=torch.int32)
    x = _random(bench, 3, 256)
    rows, order, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        active_num=experts.numel(),
        expert_num=num_experts + 1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[4, 8],
        row_idx_type=0,
    )
    if counts.cpu().tolist() != [2, 0, 0, 1]:
        return Answer(DIFFERENT, f"rows of the experts: {counts.cpu().tolist()}")
    weights = torch.rand(3, 2).bfloat16()
    # The rows after the rows of this rank's experts are undefined and must not influence the
    # result.
    rows[3:] = torch.nan
    got = torch.ops.npu.npu_moe_finalize_routing(
        rows[None], None, None, None, weights.npu(), order, None, drop_pad_mode=3
    )
    is_here = (experts >= 4) & (experts < 8)
    return bench.compare(got, x.float() * (weights.float() * is_here).sum(-1)[:, None], BFLOAT16)


def _draws(bench: Bench) -> str | Answer:
    """Draw tokens in the same way as the sampler, and compare the frequencies of the tokens with
    their probabilities.
    """
    # The engine imports torch. Only a child process may import torch.
    from dist_aclgraph.engine.sampling.race_noise import RaceNoise, make_keys, mix_seeds

    torch = bench.torch
    probabilities = torch.arange(1.0, NUM_TOKENS + 1)
    probabilities /= probabilities.sum()
    logits = probabilities.log().npu()
    noise = RaceNoise(NUM_TOKENS, lambda table: torch.from_numpy(table).npu())
    seeds = mix_seeds(torch.full((NUM_DRAWS // NUM_ROUNDS,), 7).numpy())
    counts = torch.zeros(NUM_TOKENS)
    for positions in torch.arange(NUM_DRAWS, dtype=torch.int32).chunk(NUM_ROUNDS):
        keys = torch.from_numpy(make_keys(seeds, positions.numpy()))
        race = logits - noise.log_exponentials(keys.npu().unsqueeze(-1))
        counts += torch.bincount(race.argmax(-1).cpu(), minlength=NUM_TOKENS)
    want = probabilities * NUM_DRAWS
    distance = ((counts - want).square() / want).sum().item()
    text = f"chi-square {distance:.1f} of {NUM_TOKENS - 1} degrees of freedom"
    return "as probable" if distance < MAX_CHI_SQUARE else Answer(DIFFERENT, text)


def _equal(name: str, what: str, call: Callable[[Bench], Answer], operator: str) -> Probe:
    return Probe(
        f"model_calls.{name}", f"Is {what} as on the host?", call, EQUAL, operator=operator
    )


PROBES = (
    Probe(
        "model_calls.decode_of_one_head",
        f"Is a decode step of {MANY} requests with one KV head as on the host (Qwen3-235B, tp 8)?",
        _decode_of_one_head,
        EQUAL,
    ),
    Probe(
        "model_calls.masked_decode",
        "Is a decode step with a mask in place of lengths as on the host (graph.updates: none)?",
        _masked_decode,
        EQUAL,
    ),
    _equal(
        "interleave_rope", "npu_interleave_rope (DeepSeek)", _interleave_rope, "aclnnInterleaveRope"
    ),
    _equal(
        "latent_write",
        "npu_kv_rmsnorm_rope_cache, with a slot of -1,",
        _latent_write,
        "aclnnKvRmsNormRopeCache",
    ),
    _equal("absorb", "npu_transpose_batchmatmul (DeepSeek)", _absorb, "aclnnTransposeBatchMatMul"),
    Probe(
        "model_calls.gating_by_groups",
        "Is npu_moe_gating_top_k with groups and a bias as on the host (DeepSeek-V3)?",
        _gating_by_groups,
        EQUAL,
    ),
    Probe(
        "model_calls.int8_experts",
        "Is npu_grouped_matmul of int8 as on the host (DeepSeek-V3)?",
        _int8_experts,
        EQUAL,
    ),
    Probe(
        "model_calls.routing_of_padding",
        "Does a token whose expert is the id after the last one reach no expert?",
        _routing_of_padding,
        EQUAL,
    ),
    Probe(
        "model_calls.draws",
        f"Do {NUM_DRAWS} sampled tokens follow their probabilities?",
        _draws,
        "as probable",
    ),
)
