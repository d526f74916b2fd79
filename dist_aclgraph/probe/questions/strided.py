"""Questions about inputs that are parts of wider rows.

The documents of CANN exclude these inputs, so the runtime copies them first. If the device accepts
a call, the result must equal the result for a copy of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, EQUAL, REFUSED, Answer, Bench, Probe
from dist_aclgraph.probe.questions.operators import BLOCK, DIM, LATENT, ROTATED, in_version_2

HEADS = 4


def _as_a_copy(bench: Bench, run: Callable[[Any], Any], part: Any) -> Answer:
    """Call ``run`` twice, with a part of wider rows and with a copy of this part; compare the two
    results.
    """
    want = run(part.contiguous()).cpu()
    answer = bench.compare(run(part), want)
    return Answer(ACCEPTED) if answer.found == EQUAL else answer


def _wide(bench: Bench, *shape: int) -> Any:
    return bench.torch.randn(*shape).bfloat16().npu()


def _attention(bench: Bench) -> Answer:
    """Call attention. The queries are parts of rows that hold queries, keys and values."""
    torch = bench.torch
    keys, values = (_wide(bench, 2, BLOCK, HEADS * DIM) for _ in "kv")
    table = torch.tensor([[0], [1]], dtype=torch.int32).npu()

    def run(query: Any) -> Any:
        return bench.ops.npu_fused_infer_attention_score(
            query,
            keys,
            values,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=[20, 30],
            block_table=table,
            num_heads=HEADS,
            num_key_value_heads=HEADS,
            scale=DIM**-0.5,
            input_layout="TND",
            block_size=BLOCK,
        )[0]

    return _as_a_copy(bench, run, _wide(bench, 2, 3 * HEADS, DIM)[:, :HEADS])


def _rotated_queries(bench: Bench) -> Answer:
    """Call latent attention with a ``query_rope`` that is a slice of whole queries."""
    torch = bench.torch
    query = _wide(bench, 2, HEADS, LATENT)
    latents, turned = (_wide(bench, 2, BLOCK, d) for d in (LATENT, ROTATED))

    def run(rotated: Any) -> Any:
        arguments = {
            "query": query,
            "key": latents,
            "value": latents,
            "query_rope": rotated,
            "key_rope": turned,
            "actual_seq_lengths": [1, 2],
            "actual_seq_lengths_kv": [20, 30],
            "block_table": torch.tensor([[0], [1]], dtype=torch.int32).npu(),
            "num_heads": HEADS,
            "num_key_value_heads": 1,
            "scale": 0.05,
            "input_layout": "TND_NTD",
            "block_size": BLOCK,
        }
        return bench.ops.npu_fused_infer_attention_score_v2(**in_version_2(arguments))[0]

    return _as_a_copy(bench, run, _wide(bench, 2, HEADS, DIM + ROTATED)[..., DIM:])


def _cache_rows(bench: Bench) -> Answer:
    """Write to the cache. The values are parts of rows that hold queries, keys and values."""
    torch = bench.torch
    keys = _wide(bench, 2, HEADS, DIM)
    slots = torch.tensor([3, 20], dtype=torch.int32).npu()

    def run(values: Any) -> Any:
        caches = [torch.zeros(2, 16, HEADS, DIM).bfloat16().npu() for _ in "kv"]
        bench.ops.npu_scatter_pa_kv_cache(keys, values, *caches, slots, cache_mode="Norm")
        return caches[1]

    return _as_a_copy(bench, run, _wide(bench, 2, 3 * HEADS, DIM)[:, 2 * HEADS :])


def _gemma_norm(bench: Bench) -> Answer:
    gamma = _wide(bench, DIM)
    norm = bench.ops.npu_gemma_rms_norm
    heads = _wide(bench, 2, 3 * HEADS, DIM)[:, :HEADS]
    return _as_a_copy(bench, lambda x: norm(x, gamma, 1e-6)[0], heads)


def _pairs(bench: Bench) -> Answer:
    """Rotate the last 64 elements of whole queries [tokens, heads, 1, 128 + 64]."""
    angles = _wide(bench, 2, 1, 1, ROTATED)
    rotate = bench.ops.npu_interleave_rope
    part = _wide(bench, 2, HEADS, 1, DIM + ROTATED)[..., DIM:]
    return _as_a_copy(bench, lambda x: rotate(x, angles, angles), part)


def _sparse_cache(bench: Bench) -> Answer:
    """Call sparse attention with a cache that stores each block's latents and rotated keys in one
    row.
    """
    torch = bench.torch
    query, rotated = _wide(bench, 2, HEADS, LATENT), _wide(bench, 2, HEADS, ROTATED)
    blocks = _wide(bench, 2, BLOCK * (LATENT + ROTATED))
    turned = blocks[:, BLOCK * LATENT :].view(2, BLOCK, 1, ROTATED)
    lengths = torch.tensor([1, 2], dtype=torch.int32).npu()

    def run(latents: Any) -> Any:
        return torch.ops.npu.npu_sparse_flash_attention(
            query,
            latents,
            latents,
            torch.zeros(2, 1, 1, dtype=torch.int32).npu(),
            0.05,
            block_table=torch.tensor([[0], [1]], dtype=torch.int32).npu(),
            actual_seq_lengths_query=lengths,
            actual_seq_lengths_kv=lengths,
            query_rope=rotated,
            key_rope=turned if not latents.is_contiguous() else turned.contiguous(),
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=2,
        )[0]

    return _as_a_copy(bench, run, blocks[:, : BLOCK * LATENT].view(2, BLOCK, 1, LATENT))


# Each case consists of its name, the subject of the question, the call, and a part of the
# emulator's error text.
_CASES: tuple[tuple[str, str, Callable[[Bench], Answer], str | None], ...] = (
    (
        "queries",
        "attention of queries in rows of queries, keys and values",
        _attention,
        "query must be contiguous",
    ),
    (
        "rotated_queries",
        "latent attention with rotated parts in rows of whole queries",
        _rotated_queries,
        "query_rope must be contiguous",
    ),
    (
        "cache_rows",
        "npu_scatter_pa_kv_cache with values in rows of queries, keys and values",
        _cache_rows,
        None,
    ),
    (
        "gemma_norm",
        "npu_gemma_rms_norm of heads in wider rows",
        _gemma_norm,
        "x must be contiguous",
    ),
    (
        "pairs",
        "npu_interleave_rope of rotated parts in rows of whole queries",
        _pairs,
        None,
    ),
    (
        "sparse_cache",
        "npu_sparse_flash_attention with latents and rotated keys in one tensor",
        _sparse_cache,
        None,
    ),
)

PROBES = tuple(
    Probe(f"rules.strided.{name}", f"Is {what} accepted?", call, REFUSED, rule=rule)
    for name, what, call, rule in _CASES
)
