"""Release series of CANN differ in the calls of attention that they refuse.

For each series, one process makes all calls.
"""

import json

import pytest

from tests.slow import slow

CALLS = """
def call(dtype="bfloat16", heads=4, kv_heads=2, dim=64, value_dim=None, block=128, rows=1,
         length=20, sparse=0, blocks=4, rope=False, lse=False, sequences=2, inner=0):
    half = getattr(torch, dtype)
    value_dim = value_dim or dim
    query = torch.zeros(sequences * rows, heads, dim, dtype=half)
    caches = [torch.zeros(blocks, block, kv_heads * d, dtype=half) for d in (dim, value_dim)]
    extra = {}
    if rope:
        extra["query_rope"] = torch.zeros(*query.shape[:2], 64, dtype=half).npu()
        extra["key_rope"] = torch.zeros(blocks, block, kv_heads * 64, dtype=half).npu()
    if sparse:
        extra["atten_mask"] = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(), caches[0].npu(), caches[1].npu(),
        actual_seq_qlen=[rows * (i + 1) for i in range(sequences)],
        actual_seq_kvlen=[length] * sequences,
        block_table=torch.zeros(sequences, -(-length // block) or 1, dtype=torch.int32).npu(),
        num_query_heads=heads, num_key_value_heads=kv_heads, softmax_scale=0.1,
        input_layout="TND_NTD" if rope and dim == 512 else "TND", block_size=block,
        sparse_mode=sparse, return_softmax_lse=lse, inner_precise=inner, **extra)
    torch.npu.synchronize()

answers = []
for case in json.loads(os.environ["CASES"]):
    try:
        call(**case)
        answers.append("taken")
    except RuntimeError as error:
        text = str(error)
        assert "561002" in text or "V4: " in text, text
        answers.append(text)
print("ANSWERS", json.dumps(answers))
"""
LATENT = {"heads": 4, "kv_heads": 1, "dim": 512, "rope": True}
LSE = LATENT | {"lse": True}
TAKEN = "taken"

# For each call: its arguments, its result with CANN 8.5, and its result with CANN 9.
CASES = [
    ({}, TAKEN, TAKEN),
    ({"dtype": "float16"}, "query must be bfloat16 with TND on CANN 8.5", TAKEN),
    ({"dtype": "float16", "kv_heads": 4}, "query must be bfloat16", "query must be bfloat16"),
    ({"block": 16}, "block_size 16 must be a multiple of 128", TAKEN),
    ({"block": 640}, TAKEN, TAKEN),
    ({"block": 640, "dtype": "float16"}, "must be bfloat16", "must be bfloat16 with TND, unless"),
    ({"block": 16, "kv_heads": 4}, "multiple of 128", "multiple of 128"),
    ({"block": 16, "inner": 1}, "multiple of 128", "multiple of 128"),
    ({"dim": 128}, TAKEN, TAKEN),
    ({"dim": 96}, "head size 96 with values of 96 must be 64, 128", TAKEN),
    ({"dim": 256}, "head size 256", TAKEN),
    ({"dim": 272}, "head size 272", "head size 272"),
    ({"dim": 192, "value_dim": 128}, TAKEN, TAKEN),
    ({"dim": 192}, "head size 192 with values of 192", TAKEN),
    ({"dim": 192, "kv_heads": 4}, TAKEN, TAKEN),
    ({"rows": 5, "length": 3, "sparse": 3}, "has 5 query rows, more than its 3 keys",
     "has 5 query rows, more than its 3 keys"),
    ({"rows": 5, "length": 5, "sparse": 3}, TAKEN, TAKEN),
    ({"rows": 2, "length": 0, "sparse": 3}, "has 2 query rows, more than its 0 keys",
     "has 2 query rows, more than its 0 keys"),
    ({"sparse": 2}, "sparse_mode must be 0, 3 or 4", "sparse_mode must be 0, 3 or 4"),
    ({"length": 0}, "must not be all zero", TAKEN),
    # Both sequences use the same block. CANN 8.5's check counts this block twice.
    ({"blocks": 1}, "need 2 blocks, the cache has 1", TAKEN),
    (LATENT, TAKEN, TAKEN),
    (LATENT | {"dtype": "float16"}, TAKEN, TAKEN),
    (LATENT | {"block": 16}, TAKEN, TAKEN),
    (LATENT | {"block": 32}, "block_size 32 must be 16 or 128", TAKEN),
    (LATENT | {"block": 640}, "block_size 640 must be 16 or 128", "at most 512"),
    (LSE, "softmax_lse is not given on CANN 8.5.0", TAKEN),
    (LATENT | {"sparse": 4}, "must be 0 or 3 on CANN 8.5", TAKEN),
]  # fmt: skip


@pytest.mark.parametrize("cann", ["8.5.0", slow("8.5.1"), slow("9.0.0"), "9.1.0"])
def test_each_release_series_accepts_its_own_calls_of_attention(run_script, cann):
    calls = f"os.environ['CASES'] = {json.dumps([case for case, *_ in CASES])!r}\n" + CALLS

    status, output = run_script(calls, cann=cann)

    assert status == 0, output
    answers = json.loads(output.partition("ANSWERS ")[2])
    for (case, old, new), answer in zip(CASES, answers, strict=True):
        is_old = cann.startswith("8.") and not (cann == "8.5.1" and case == LSE)
        said = old if is_old else new
        assert said in answer if said != TAKEN else answer == TAKEN, (case, said, answer)
