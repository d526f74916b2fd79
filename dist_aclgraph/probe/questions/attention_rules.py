"""Rules of the attention operator that depend on CANN's release series.

The questions are calls at the limits of these rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dist_aclgraph.probe.question import ACCEPTED, REFUSED, Bench, ByCann, Probe
from dist_aclgraph.probe.questions.operators import in_version_2


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
    table_rows: int = 2,
    rows_behind: int = 0,
    sinks: bool = False,
    masked: bool = False,
) -> str:
    """Call the operator for two requests. All tensors contain zeros.

    Args:
        padded: number of keys of the second request; None means ``length``.
        rows_behind: number of query rows after the rows of the last request.
        masked: whether the call has a mask with one row for each query row.
    """
    torch = bench.torch
    half = getattr(torch, dtype)
    query = torch.zeros(2 * rows + rows_behind, heads, dim, dtype=half)
    keys, values = (
        torch.zeros(blocks, block, kv_heads * d, dtype=half) for d in (dim, value_dim or dim)
    )
    extra: dict[str, Any] = {}
    if rope:
        extra["query_rope"] = torch.zeros(*query.shape[:2], 64, dtype=half).npu()
        extra["key_rope"] = torch.zeros(blocks, block, kv_heads * 64, dtype=half).npu()
    if sinks:
        extra["learnable_sink"] = torch.zeros(heads, dtype=half).npu()
    if sparse:
        extra["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    if masked:
        extra["atten_mask"] = torch.zeros(len(query), block, dtype=torch.bool).npu()
    arguments = {
        "query": query.npu(),
        "key": keys.npu(),
        "value": values.npu(),
        "actual_seq_lengths": [rows, 2 * rows],
        "actual_seq_lengths_kv": [length, length if padded is None else padded],
        "block_table": torch.zeros(table_rows, -(-length // block) or 1, dtype=torch.int32).npu(),
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": 0.1,
        "input_layout": "TND_NTD" if rope and dim == 512 else "TND",
        "block_size": block,
        "sparse_mode": sparse,
        "softmax_lse_flag": lse,
        **extra,
    }
    # Latent attention and attention with sinks use version 2 of the operator, as in layers/.
    if rope or sinks:
        bench.ops.npu_fused_infer_attention_score_v2(**in_version_2(arguments))
    else:
        bench.ops.npu_fused_infer_attention_score(**arguments)
    return ACCEPTED


_LATENT: dict[str, Any] = {"kv_heads": 1, "dim": 512, "rope": True}

_SINCE_9 = ByCann(REFUSED, ACCEPTED)
_SINCE_8_5_1 = ByCann(REFUSED, ACCEPTED, cann_8_5_1=ACCEPTED)

# Each case consists of its name, the arguments of the call, the expected answer, and a part of the
# emulator's error text.
_CASES: tuple[tuple[str, dict[str, Any], str | ByCann, str | None], ...] = (
    ("plain", {}, ACCEPTED, None),
    ("float16", {"dtype": "float16"}, _SINCE_9, "query must be bfloat16"),
    (
        "float16_own_keys",
        {"dtype": "float16", "kv_heads": 4},
        REFUSED,
        "query must be bfloat16",
    ),
    ("float32", {"dtype": "float32"}, REFUSED, "query must be float16 or bfloat16"),
    ("block_16", {"block": 16}, _SINCE_9, "block_size 16 must be"),
    ("block_640", {"block": 640}, ACCEPTED, "block_size 640 must be"),
    ("block_16_own_keys", {"block": 16, "kv_heads": 4}, REFUSED, "block_size 16 must be"),
    ("dim_96", {"dim": 96}, _SINCE_9, "head size 96 "),
    ("dim_256", {"dim": 256}, _SINCE_9, "head size 256 "),
    ("dim_272", {"dim": 272}, REFUSED, "head size 272 "),
    # This call is refused, so the layers add a query head of zeros after each query head.
    ("dim_256_own_keys", {"dim": 256, "kv_heads": 4}, REFUSED, "head size 256 "),
    # This is the shape of GLM-5's prompts: keys have 192 + 64 elements, and values have 256.
    (
        "rope_192",
        {"dim": 192, "value_dim": 256, "kv_heads": 4, "rope": True},
        REFUSED,
        "with query_rope the head size",
    ),
    ("dim_192_values_128", {"dim": 192, "value_dim": 128}, ACCEPTED, None),
    ("dim_192", {"dim": 192}, _SINCE_9, "head size 192 "),
    ("longer_than_keys", {"rows": 5, "length": 3, "sparse": 3}, REFUSED, "query rows, more"),
    ("as_long_as_keys", {"rows": 5, "length": 5, "sparse": 3}, ACCEPTED, None),
    # vllm-ascend pads a step with requests that have one query row and no keys.
    ("padded_row", {"padded": 0, "sparse": 3}, ACCEPTED, None),
    ("padded_row_sparse_0", {"padded": 0}, ACCEPTED, None),
    ("sparse_2", {"sparse": 2}, REFUSED, "sparse_mode must be 0, 3 or 4"),
    # With a mask for each row, a request could contain several branches of a tree of drafts.
    ("mask_sparse_0", {"masked": True}, REFUSED, "with TND sparse_mode 0 takes no"),
    ("no_keys", {"length": 0}, _SINCE_9, "must not be all zero"),
    ("shared_block", {"blocks": 1}, _SINCE_9, "blocks, the cache has"),
    # If a device accepts the next two calls, the runtime need not pass query lengths and KV lengths
    # of padding rows.
    ("longer_table", {"table_rows": 3}, REFUSED, "needs an entry for each row"),
    ("rows_behind_last", {"rows_behind": 1}, REFUSED, "but T (rows of query)"),
    ("group_of_72", {"heads": 72, "kv_heads": 1}, REFUSED, "num_key_value_heads is 72"),
    ("sinks_float16", {"dtype": "float16", "sinks": True}, REFUSED, "learnable_sink must be"),
    ("latent", _LATENT, ACCEPTED, None),
    ("latent_float16", _LATENT | {"dtype": "float16"}, ACCEPTED, None),
    ("latent_block_32", _LATENT | {"block": 32}, _SINCE_9, "block_size 32 must be"),
    ("latent_block_640", _LATENT | {"block": 640}, REFUSED, "block_size 640 must be"),
    ("latent_lse", _LATENT | {"lse": True}, _SINCE_8_5_1, "softmax_lse is not given"),
    ("latent_heads_96", _LATENT | {"heads": 96}, REFUSED, "64 or 128, got 96"),
    ("latent_rows_17", _LATENT | {"rows": 17, "sparse": 3}, REFUSED, "16 query rows"),
    (
        "latent_mask_sparse_0",
        _LATENT | {"masked": True},
        _SINCE_9,
        "with head size 512 sparse_mode 0 takes no",
    ),
    ("latent_sparse_4", _LATENT | {"sparse": 4}, _SINCE_9, "sparse_mode must be 0 or 3"),
)


def _in_words(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items()) or "a plain call"


PROBES = tuple(
    Probe(
        f"rules.attention.{name}",
        f"Does attention accept {_in_words(case)}?",
        partial(_call, **case),
        says,
        rule=rule,
    )
    for name, case, says, rule in _CASES
)
