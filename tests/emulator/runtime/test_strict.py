"""Calls that the operators' documents exclude are refused. The message names the operator and the
rule.
"""

import pytest
import torch
import torch_npu

from tests.emulator.compare import refused_by

FIA = "aclnnFusedInferAttentionScoreV3: "


def attention(**changes):
    """Call attention with the arguments of a decode step of two sequences; ``changes`` replaces
    some arguments.
    """
    options = {
        "query": torch.zeros(2, 4, 64, dtype=torch.float16),
        "key": torch.zeros(5, 16, 128, dtype=torch.float16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [3, 20],
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "block_size": 16,
    } | changes
    options.setdefault("value", options["key"])
    options = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return torch_npu.npu_fused_infer_attention_score(
        options.pop("query"), options.pop("key"), options.pop("value"), **options
    )


def half(*shape):
    return torch.zeros(*shape, dtype=torch.float16)


def test_the_valid_call_is_taken():
    attention()


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be float16 or bfloat16", {"query": torch.zeros(2, 4, 64),
                                               "key": torch.zeros(5, 16, 128)}),
        ("key must be Half", {"key": torch.zeros(5, 16, 128)}),
        ("head size 40 is not a multiple of 16", {"query": half(2, 4, 40), "key": half(5, 16, 80)}),
        ("head size 576, at most 512", {"query": half(2, 4, 576), "key": half(5, 16, 1152)}),
        ("block_size 24 must be a multiple of 16", {"block_size": 24, "key": half(5, 24, 128)}),
        ("block_size 2048", {"block_size": 2048, "key": half(2, 2048, 128)}),
        ("num_heads 4 is not a multiple of num_key_value_heads 3", {"num_key_value_heads": 3}),
        ("has 2 entries, actual_seq_lengths_kv 1", {"actual_seq_lengths_kv": [3]}),
        ("actual_seq_lengths must not decrease", {"actual_seq_lengths": [2, 1]}),
        ("but T (rows of query) is 2", {"actual_seq_lengths": [1, 1]}),
        ("actual_seq_lengths_kv must be given", {"actual_seq_lengths_kv": None}),
        ("block_table must be int32", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
        ("block_table has 1 rows for 2", {"block_table": torch.zeros(1, 2, dtype=torch.int32)}),
        ("block_table has 3 rows for 2", {"block_table": torch.zeros(3, 2, dtype=torch.int32)}),
        ("actual_seq_lengths_kv has 40", {"actual_seq_lengths_kv": [3, 40]}),
        ("sparse_mode 3 needs the 2048 x 2048", {"sparse_mode": 3}),
        ("atten_mask must be 2048 x 2048", {"sparse_mode": 3,
                                            "atten_mask": torch.ones(64, 64, dtype=torch.bool)}),
        ("atten_mask must be bool, int8 or uint8", {"sparse_mode": 3,
                                                    "atten_mask": torch.ones(2048, 2048)}),
        ("with sparse_mode 4 pre_tokens -1 and next_tokens 0 leave no key",
         {"sparse_mode": 4, "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
          "pre_tokens": -1, "next_tokens": 0}),
        ("must be [blocks, block_size, heads * D]", {"key": half(5, 16, 2, 64)}),
        ("key must be contiguous", {"key": half(5, 16, 256)[:, :, :128]}),
    ],
)  # fmt: skip
def test_attention_refuses(rule, changes):
    if "contiguous" in rule:
        changes = {"key": half(5, 16, 256).npu()[:, :, :128]}
    with pytest.raises(RuntimeError) as error:
        attention(**changes)
    assert FIA in str(error.value) and rule in str(error.value)


def write(key, cache, slots):
    torch_npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode="Norm")


def test_cache_writes_refuse():
    key, cache = half(2, 2, 16).npu(), half(4, 8, 2, 16).npu()
    slots = torch.zeros(2, dtype=torch.int32).npu()
    name = "aclnnScatterPaKvCache"
    refused_by(
        name, "must be contiguous", lambda: write(half(2, 2, 32).npu()[..., :16], cache, slots)
    )
    refused_by(name, "must be int32 or int64", lambda: write(key, cache, slots.float()))
    refused_by(name, "the cache must be Half", lambda: write(key, cache.float(), slots))
    refused_by(name, "for 2 tokens", lambda: write(key, cache, slots[:1]))
    refused_by(name, "4 dimensions", lambda: write(key, cache.view(4, 8, 32), slots))


def test_rotary_refuses():
    x, angle = half(1, 2, 4, 64).npu(), half(1, 2, 1, 64).npu()
    name = "aclnnRotaryPositionEmbedding"
    flat, flat_angle = x[0, 0], angle[0, 0]
    refused_by(name, "3 or 4 dim", lambda: torch_npu.npu_rotary_mul(flat, flat_angle, flat_angle))
    narrow = half(1, 2, 1, 32).npu()
    refused_by(name, "as wide as x", lambda: torch_npu.npu_rotary_mul(x, narrow, narrow))
    small, small_angle = half(2, 4, 32).npu(), half(2, 1, 32).npu()
    refused_by(
        "aclnnApplyRotaryPosEmbV2",
        "D must be 64 or 128",
        lambda: torch_npu.npu_apply_rotary_pos_emb(
            small, small.clone(), small_angle, small_angle, layout="TND"
        ),
    )


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("learnable_sink must be bfloat16", {"learnable_sink": half(4)}),
        ("must have one element for each of 4 heads", {"learnable_sink": half(2).bfloat16()}),
        ("softmax_lse with learnable_sink", {"return_softmax_lse": True}),
        ("learnable_sink with value heads of 192, at most 128",
         {"query": half(2, 4, 192), "key": half(5, 128, 768)}),
    ],
)  # fmt: skip
def test_attention_with_sinks_refuses(rule, changes):
    options = {
        "query": half(2, 4, 64),
        "key": half(5, 128, 128),
        "learnable_sink": half(4).bfloat16(),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
    } | changes
    heads = options["key"].shape[-1] // options["query"].shape[-1]
    options = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    query, key = options.pop("query").bfloat16(), options.pop("key").bfloat16()
    refused_by(
        "aclnnFusedInferAttentionScoreV4",
        rule,
        lambda: torch_npu.npu_fused_infer_attention_score_v2(
            query, key, key, **options, actual_seq_qlen=[1, 2], actual_seq_kvlen=[3, 20],
            num_query_heads=4, num_key_value_heads=heads, input_layout="TND", block_size=128,
        ),
    )  # fmt: skip


def test_norms_refuse():
    x = half(2, 64).npu()
    refused_by("aclnnRmsNorm", "trailing shape", lambda: torch_npu.npu_rms_norm(x, half(32).npu()))
    refused_by(
        "aclnnAddRmsNorm",
        "gamma must be Half",
        lambda: torch_npu.npu_add_rms_norm(x, x, torch.zeros(64).npu()),
    )


def test_products_of_integers_are_refused():
    a = torch.ones(2, 2, dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16 is needed"):
        a @ a
