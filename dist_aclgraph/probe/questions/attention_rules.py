"""Rules of the attention operator that depend on CANN's release series.

The questions are calls at the limits of these rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, Bench, ByCann, Probe


def _call(
    bench: Bench,
    *,
    dtype: str = "bfloat16",
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    block: int = 128,
    rows: int = 1,
    length: int = 20,
    padded: int | None = None,
    sparse: int = 0,
    blocks: int = 4,
    rope: bool = False,
    lse: bool = False,
) -> str:
    """Call the operator for two requests. All tensors contain zeros.

    Args:
        padded: number of keys of the second request; None means ``length``.
    """
    torch = bench.torch
    half = getattr(torch, dtype)
    query = torch.zeros(2 * rows, heads, dim, dtype=half)
    keys, values = (
        torch.zeros(blocks, block, kv_heads * d, dtype=half) for d in (dim, value_dim or dim)
    )
    extra: dict[str, Any] = {}
    if rope:
        extra["query_rope"] = torch.zeros(*query.shape[:2], 64, dtype=half).npu()
        extra["key_rope"] = torch.zeros(blocks, block, kv_heads * 64, dtype=half).npu()
    if sparse:
        extra["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    bench.ops.npu_fused_infer_attention_score_v2(
        query.npu(),
        keys.npu(),
        values.npu(),
        actual_seq_qlen=[rows, 2 * rows],
        actual_seq_kvlen=[length, length if padded is None else padded],
        block_table=torch.zeros(2, -(-length // block) or 1, dtype=torch.int32).npu(),
        num_query_heads=heads,
        num_key_value_heads=kv_heads,
        softmax_scale=0.1,
        input_layout="TND_NTD" if rope and dim == 512 else "TND",
        block_size=block,
        sparse_mode=sparse,
        return_softmax_lse=lse,
        **extra,
    )
    return ACCEPTED


_LATENT: dict[str, Any] = {"kv_heads": 1, "dim": 512, "rope": True}

# Name; arguments of the call; whether CANN 8.5 accepts the call; whether CANN 9 accepts the call; a
# part of the text of the refusal.
_CASES: tuple[tuple[str, dict[str, Any], bool, bool, str | None], ...] = (
    ("plain", {}, True, True, None),
    ("float16", {"dtype": "float16"}, False, True, "query must be bfloat16"),
    (
        "float16_own_keys",
        {"dtype": "float16", "kv_heads": 4},
        False,
        False,
        "query must be bfloat16",
    ),
    ("float32", {"dtype": "float32"}, False, False, "query must be float16 or bfloat16"),
    ("block_16", {"block": 16}, False, True, "block_size 16 must be"),
    ("block_640", {"block": 640}, True, True, "block_size 640 must be"),
    ("block_16_own_keys", {"block": 16, "kv_heads": 4}, False, False, "block_size 16 must be"),
    ("dim_96", {"dim": 96}, False, True, "head size 96 "),
    ("dim_256", {"dim": 256}, False, True, "head size 256 "),
    ("dim_272", {"dim": 272}, False, False, "head size 272 "),
    ("dim_192_values_128", {"dim": 192, "value_dim": 128}, True, True, None),
    ("dim_192", {"dim": 192}, False, True, "head size 192 "),
    ("longer_than_keys", {"rows": 5, "length": 3, "sparse": 3}, False, False, "query rows, more"),
    ("as_long_as_keys", {"rows": 5, "length": 5, "sparse": 3}, True, True, None),
    # vllm-ascend pads a step with requests that have one row and no keys.
    ("padded_row", {"padded": 0, "sparse": 3}, False, False, "query rows, more"),
    ("padded_row_sparse_0", {"padded": 0}, True, True, None),
    ("sparse_2", {"sparse": 2}, False, False, "sparse_mode must be 0, 3 or 4"),
    ("no_keys", {"length": 0}, False, True, "must not be all zero"),
    ("shared_block", {"blocks": 1}, False, True, "blocks, the cache has"),
    ("latent", _LATENT, True, True, None),
    ("latent_float16", _LATENT | {"dtype": "float16"}, True, True, None),
    ("latent_block_32", _LATENT | {"block": 32}, False, True, "block_size 32 must be"),
    ("latent_block_640", _LATENT | {"block": 640}, False, False, "block_size 640 must be"),
    ("latent_lse", _LATENT | {"lse": True}, False, True, "softmax_lse is not given"),
    ("latent_sparse_4", _LATENT | {"sparse": 4}, False, True, "sparse_mode must be 0 or 3"),
)


def _in_words(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items()) or "a plain call"


def _answer(is_accepted: bool) -> str:
    return ACCEPTED if is_accepted else REFUSED


PROBES = tuple(
    Probe(
        f"rules.attention.{name}",
        f"Does attention accept {_in_words(case)}?",
        partial(_call, **case),
        ByCann(_answer(cann_8), _answer(cann_9)),
        rule=rule,
    )
    for name, case, cann_8, cann_9, rule in _CASES
)
