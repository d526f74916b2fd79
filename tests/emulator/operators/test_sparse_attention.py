"""Sparse latent attention: the choice of keys, attention to the latents of chosen keys, and layer
norms.
"""

from pathlib import Path

import pytest
import torch
import torch_npu
from sparse_step import LENGTHS, SCALE, Step, ints

from tests.emulator.compare import assert_close, refused_by

HALVES = [torch.bfloat16, torch.float16]
half = torch.float16


def sets_of(chosen):
    return [set(row[row >= 0].tolist()) for row in chosen.cpu()[:, 0]]


# ---- the choice of keys


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("index_heads,count", [(8, 6), (64, 20), (1, 1), (8, 2048)])
def test_keys_with_the_greatest_scores_are_chosen(dtype, index_heads, count):
    step = Step(dtype, index_heads=index_heads)

    chosen = step.choose(count)

    assert chosen.shape == (step.rows, 1, count) and chosen.dtype == torch.int32
    for row, request, seen in step.each_row():
        keys = step.tokens["index"][request][:seen].float()
        scores = (step.index_query[row].float() @ keys.t()).relu()
        scores = step.weights[row].float() @ scores
        got = chosen.cpu()[row, 0]
        number = min(seen, count)
        assert (got[:number] >= 0).all() and (got[number:] == -1).all()
        assert len(set(got[:number].tolist())) == number
        assert torch.allclose(scores[got[:number].long()], scores.topk(number)[0], rtol=1e-5)


def test_a_mask_hides_later_keys_only_with_mode_3():
    step = Step()
    causal, free = step.choose(64), step.choose(64, sparse_mode=0)
    assert [len(s) for s in sets_of(causal)] == [seen for *_, seen in step.each_row()]
    assert [len(s) for s in sets_of(free)] == [LENGTHS[r] for _, r, _ in step.each_row()]


def test_a_graph_follows_new_lengths_without_updates():
    step = Step()
    step.upload()
    step.attend(step.choose(8))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        chosen = step.choose(8)
        out = step.attend(chosen)

    for lengths in (LENGTHS, (9, 3, 17), (3, 1, 16)):
        step.lengths["keys"].copy_(ints(*lengths))
        graph.replay()
        wanted = step.choose(8)
        assert torch.equal(chosen.cpu(), wanted.cpu())
        assert torch.equal(out.cpu(), step.attend(wanted).cpu())


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be float16 or bfloat16", {"query": torch.zeros(20, 8, 128)}),
        ("D must be 128", {"query": torch.zeros(20, 8, 64, dtype=half)}),
        ("query has 80 heads", {"query": torch.zeros(20, 80, 128, dtype=half)}),
        ("query must be [T, N, D]", {"query": torch.zeros(20, 1, 8, 128, dtype=half)}),
        ("key must be Half", {"key": torch.zeros(9, 16, 1, 128).bfloat16()}),
        ("key must be [blocks", {"key": torch.zeros(9, 16, 2, 128, dtype=half)}),
        ("block_size 24", {"key": torch.zeros(9, 24, 1, 128, dtype=half)}),
        ("block_size 2048", {"key": torch.zeros(2, 2048, 1, 128, dtype=half)}),
        ("weights must be Half", {"weights": torch.zeros(20, 8)}),
        ("weights of shape", {"weights": torch.zeros(20, 4, dtype=half)}),
        ("sparse_count 2500", {"sparse_count": 2500}),
        ("sparse_count 9216", {"sparse_count": 9216}),
        ("sparse_mode 4", {"sparse_mode": 4}),
        ("pre_tokens", {"pre_tokens": 5}),
        ("are not emulated, only TND", {"layout_key": "BSND", "block_table": None}),
        ("block_table must be given", {"block_table": None}),
        ("block_table must be int32", {"block_table": torch.zeros(3, 4, dtype=torch.int64)}),
        ("actual_seq_lengths_query must be given", {"actual_seq_lengths_query": None}),
        ("must be int32", {"actual_seq_lengths_key": torch.tensor(LENGTHS)}),
        ("entries for 3 requests", {"actual_seq_lengths_key": ints(40, 5)}),
        ("return_value", {"return_value": True}),
    ],
)
def test_a_choice_is_refused(rule, changes):
    step = Step(half)
    refused_by("aclnnLightningIndexer", rule, lambda: step.choose(**{"count": 8, **changes}))


# ---- attention to chosen latents


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads,count,block_size", [(4, 6, 16), (128, 32, 64), (1, 3, 128)])
def test_attention_to_the_chosen_latents(dtype, heads, count, block_size):
    step = Step(dtype, heads, block_size=block_size)
    chosen = step.choose(count).cpu()

    out = step.attend(chosen)

    assert_attends(step, chosen, out)


def test_rows_before_and_after_the_largest_choice():
    """The operator can choose 2048 keys. The last row of the second request sees 2049 keys."""
    step = Step(heads=1, index_heads=1, block_size=128, key_lengths=(2047, 2049), queries=(1, 2))
    chosen = step.choose(2048).cpu()

    out = step.attend(chosen)

    assert [len(keys) for keys in sets_of(chosen)] == [2047, 2048, 2048]
    assert chosen[0, 0, -1] == -1
    assert set(range(2048)) == sets_of(chosen)[1]
    assert_attends(step, chosen, out)


def assert_attends(step, chosen, out, but=None):
    for row, request, _ in step.each_row():
        if row == but:
            continue
        keys = chosen[row, 0][chosen[row, 0] >= 0].long()
        latents, ropes = (step.tokens[name][request][keys].float() for name in ("latent", "rope"))
        scores = step.query[row].float() @ latents.t() + step.query_rope[row].float() @ ropes.t()
        assert_close(out[row], (scores * SCALE).softmax(-1) @ latents)


@pytest.mark.parametrize("dtype", HALVES)
def test_keys_that_follow_each_other(dtype):
    step = Step(dtype)
    chosen = step.choose(6).cpu()
    keys = {name: torch.cat(step.tokens[name]).unsqueeze(1) for name in ("latent", "rope")}

    out, greatest, sums = step.attend_to_all(chosen, keys, step.lengths["keys"].cumsum(0).int())

    assert_attends(step, chosen, out)
    assert_sums(step, chosen, greatest, sums)


def test_the_whole_cache_as_one_request_whose_choices_are_slots():
    step = Step(heads=16)
    chosen = step.choose(6).cpu()
    slots = torch.full_like(chosen, -1)
    for row, request, _ in step.each_row():
        keys = chosen[row, 0][chosen[row, 0] >= 0].long()
        slots[row, 0, : len(keys)] = step.table[request, keys // 16] * 16 + keys % 16
    slots[7] = -1
    keys = {name: step.pages[name].flatten(0, 1) for name in ("latent", "rope")}
    one = {"sparse_mode": 0, "actual_seq_lengths_query": ints(step.rows)}

    out, greatest, sums = step.attend_to_all(slots, keys, ints(len(keys["latent"])), **one)

    assert not out[7].any() and greatest[0, 7].isnan().all() and sums[0, 7].isnan().all()
    assert_attends(step, chosen, out, but=7)
    chosen[7] = -1
    assert_sums(step, chosen, greatest, sums)


def assert_sums(step, chosen, greatest, sums):
    """Check the greatest scores and the sums of exponentials of all rows that have keys."""
    assert greatest.shape == sums.shape == (1, step.rows, step.query.shape[1])
    for row, request, _ in step.each_row():
        keys = chosen[row, 0][chosen[row, 0] >= 0].long()
        if not len(keys):
            continue
        latents, ropes = (step.tokens[name][request][keys].float() for name in ("latent", "rope"))
        scores = step.query[row].float() @ latents.t() + step.query_rope[row].float() @ ropes.t()
        torch.testing.assert_close(greatest[0, row].cpu(), scores.amax(-1) * SCALE)
        found = greatest[0, row].cpu() + sums[0, row].cpu().log()
        torch.testing.assert_close(found, (scores * SCALE).logsumexp(-1))


def test_a_row_without_chosen_keys_is_zero():
    step = Step()
    out = step.attend(torch.full((step.rows, 1, 4), -1, dtype=torch.int32))
    assert not out.any()


def test_a_choice_of_all_keys_is_latent_attention():
    step = Step()
    every = step.attend(step.choose(64))
    latents, ropes = (step.pages[name].flatten(2).npu() for name in ("latent", "rope"))
    latents, ropes = (torch.nan_to_num(t) for t in (latents, ropes))
    dense, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query=step.query.npu(),
        key=latents,
        value=latents,
        query_rope=step.query_rope.npu(),
        key_rope=ropes,
        actual_seq_qlen=step.lengths["ends"].tolist(),
        actual_seq_kvlen=list(LENGTHS),
        block_table=step.table.npu(),
        num_query_heads=4,
        num_key_value_heads=1,
        softmax_scale=SCALE,
        input_layout="TND",
        block_size=16,
        sparse_mode=3,
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu(),
    )
    assert_close(every, dense.cpu())


TND = {
    "layout_kv": "TND",
    "key": torch.zeros(64, 1, 512, dtype=half),
    "key_rope": torch.zeros(64, 1, 64, dtype=half),
}


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be float16 or bfloat16", {"query": torch.zeros(20, 4, 512)}),
        ("D must be 512", {"query": torch.zeros(20, 4, 256, dtype=half)}),
        ("must be a power of two up to 128", {"query": torch.zeros(20, 48, 512, dtype=half)}),
        ("attention_mode must be 2, got 0", {"attention_mode": 0}),
        ("sparse_block_size 64", {"sparse_block_size": 64}),
        ("return_softmax_lse", {"return_softmax_lse": True}),
        ("query_rope and key_rope must be given", {"query_rope": None}),
        ("must have D 64", {"query_rope": torch.zeros(20, 4, 32, dtype=half)}),
        ("query_rope of shape", {"query_rope": torch.zeros(20, 2, 64, dtype=half)}),
        ("key must be Half", {"key": torch.zeros(17, 16, 1, 512).bfloat16()}),
        ("key must be [blocks", {"key": torch.zeros(17, 16, 512, dtype=half)}),
        ("have different pages", {"key_rope": torch.zeros(5, 16, 1, 64, dtype=half)}),
        ("value must be the same tensor", {"value": torch.zeros(17, 16, 1, 512, dtype=half)}),
        ("sparse_indices must be int32", {"chosen": torch.zeros(20, 1, 4, dtype=torch.int64)}),
        ("sparse_indices must be int32", {"chosen": torch.zeros(19, 1, 4, dtype=torch.int32)}),
        ("sparse_mode 1", {"sparse_mode": 1}),
        ("are not emulated, only TND", {"layout_kv": "BSND"}),
        ("block_table must be given with PA_BSND", {"block_table": None}),
        ("key must be [T", {"layout_kv": "TND", "block_table": None}),
        ("and only with it", TND),
        ("have different pages", TND | {"key_rope": torch.zeros(9, 1, 64, dtype=half)}),
        ("the KV lengths must be given", {"actual_seq_lengths_kv": None}),
        ("has 4 entries for 3 requests", {"actual_seq_lengths_query": ints(3, 4, 19, 20)}),
    ],
)
def test_attention_to_chosen_latents_is_refused(rule, changes):
    step = Step(half)
    chosen = torch.zeros(20, 1, 4, dtype=torch.int32)
    arguments = {"chosen": chosen, **changes}
    refused_by("aclnnSparseFlashAttention", rule, lambda: step.attend(**arguments))


# ---- latents in int8


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads,count,block_size", [(4, 6, 16), (128, 32, 64), (1, 3, 128)])
def test_attention_to_latents_in_int8_is_attention_to_their_values(dtype, heads, count, block_size):
    step = Step(dtype, heads, block_size=block_size)
    chosen = step.choose(count).cpu()
    rows = step.pack()

    out = step.attend_to_packed(chosen, rows)

    assert rows.shape[-1] == 656
    values = rows[..., :512].float().unflatten(-1, (4, 128))
    scales = rows[..., 640:].contiguous().view(torch.float32)
    step.pages["latent"] = (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)
    assert_close(out, step.attend(chosen).cpu())


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("mode", [0, 3])
def test_blocks_of_latents_in_int8_are_all_their_keys_that_a_row_sees(block, mode):
    step = Step(heads=4)
    rows, count = step.pack(), -(-max(LENGTHS) // block) + 1
    blocks, keys = (torch.full((step.rows, 1, n), -1, dtype=torch.int32) for n in (count, 48))
    for row, request, seen in step.each_row():
        seen = seen if mode == 3 else LENGTHS[request]
        whole = torch.randperm(seen // block).int()  # the last block may be incomplete
        named = torch.cat([whole, torch.arange(seen // block, -(-seen // block)).int()])
        blocks[row, 0, : len(named)] = named
        keys[row, 0, :seen] = torch.arange(seen)

    out = step.attend_to_packed(blocks, rows, sparse_block_size=block, sparse_mode=mode)

    assert_close(out, step.attend_to_packed(keys, rows, sparse_mode=mode).cpu())


def test_int8_changes_each_latent_by_half_a_scale_at_most():
    step = Step(heads=1)
    exact = step.pages["latent"].float()
    rows = step.pack()
    scales = rows[..., 640:].contiguous().view(torch.float32).repeat_interleave(128, -1)
    error = (rows[..., :512].float() * scales - exact).abs()
    assert (error.nan_to_num() <= scales * 0.5001).all()


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be float16 or bfloat16", {"query": torch.zeros(20, 4, 576)}),
        ("query must have D 576", {"query": torch.zeros(20, 4, 512, dtype=half)}),
        ("must be a power of two up to 128", {"query": torch.zeros(20, 48, 576, dtype=half)}),
        ("key must be int8", {"key": torch.zeros(17, 16, 1, 656, dtype=half)}),
        ("key must be [blocks", {"key": torch.zeros(17, 16, 1, 640, dtype=torch.int8)}),
        ("block_size 24", {"key": torch.zeros(17, 24, 1, 656, dtype=torch.int8)}),
        ("value must be the same", {"value": torch.zeros(17, 16, 1, 656, dtype=torch.int8)}),
        ("must be 2", {"key_quant_mode": 0}),
        ("are reserved", {"key_dequant_scale": torch.zeros(4)}),
        ("attention_mode must be 2, got 0", {"attention_mode": 0}),
        ("quant_scale_repo_mode must be 1", {"quant_scale_repo_mode": 0}),
        ("tile_size must be 128", {"tile_size": 64}),
        ("rope_head_dim must be 64", {"rope_head_dim": 32}),
        ("sparse_block_size 0 must be", {"sparse_block_size": 0}),
        ("sparse_block_size 12 must be a power of two", {"sparse_block_size": 12}),
        ("sparse_block_size 32 must be a power of two", {"sparse_block_size": 32}),
        ("are not emulated, only TND", {"layout_kv": "TND"}),
        ("sparse_mode 1", {"sparse_mode": 1}),
        ("has 4 entries for 3 requests", {"actual_seq_lengths_query": ints(3, 4, 19, 20)}),
    ],
)
def test_attention_to_latents_in_int8_is_refused(rule, changes):
    step = Step(half)
    arguments = {"chosen": torch.zeros(20, 1, 4, dtype=torch.int32), "rows": step.pack(), **changes}
    refused_by("aclnnKvQuantSparseFlashAttention", rule, lambda: step.attend_to_packed(**arguments))


# ---- bad values in device tensors, which a real device does not check

FAILURES = {
    "decreases at request 1": "step.choose(8, actual_seq_lengths_query=ints(3, 2, 20))",
    "at request 2, but T is 20": "step.choose(8, actual_seq_lengths_query=ints(3, 4, 19))",
    "reaches 21 at request 2": "step.choose(8, actual_seq_lengths_query=ints(3, 4, 21))",
    "has room for 64": "step.choose(8, actual_seq_lengths_key=ints(65, 5, 17))",
    "length of request 1 is -1": "step.choose(8, actual_seq_lengths_key=ints(40, -1, 17))",
    "more than its 15 keys": "step.choose(8, actual_seq_lengths_key=ints(40, 5, 15))",
    "names block 99": "step.choose(8, block_table=step.table * 0 + 99)",
    "behind a -1": "step.attend(choice(0, -1, 1))",
    "name key 38; the row sees 38": "step.attend(choice(38, 0, -1))",
    "name key -2": "step.attend(choice(-2, 0, -1))",
    "key 32 before other": "packed(choice(2, 0, 1), step.pack(), **blocks)",
    "name key 48; the row sees 38": "packed(choice(3, -1, -1), step.pack(), **blocks)",
    "name key 7 twice": "step.attend(choice(7, 3, 7))",
    "has 16 query rows, more than its 3": "step.attend(choice(0, 1, 2), "
    "actual_seq_lengths_kv=ints(40, 5, 3))",
    "reaches 63 at request 2, but there are 62": "step.attend_to_all(choice(0), KEYS, "
    "ints(40, 45, 63))",
    "actual_seq_lengths_kv decreases at request 1": "step.attend_to_all(choice(0), KEYS, "
    "ints(40, 5, 62))",
    "index -1 lies outside": "torch_npu.npu_scatter_nd_update_(torch.zeros(4, 2).npu(), "
    "ints([0], [-1]).npu(), torch.ones(2, 2).npu())",
}


def test_values_that_no_operator_may_get_stop_the_device(run_script):
    folder = str(Path(__file__).parents[1])
    status, output = run_script(
        f"""
        sys.path.insert(0, {folder!r})
        from sparse_step import *
        def choice(*keys):
            chosen = torch.full((20, 1, 3), -1, dtype=torch.int32)
            chosen[0, 0, : len(keys)] = ints(*keys)
            return chosen
        step = Step()
        packed, blocks = step.attend_to_packed, {{"sparse_block_size": 16}}
        KEYS = {{name: torch.cat(step.tokens[name]).unsqueeze(1) for name in ("latent", "rope")}}
        for device, code in enumerate({list(FAILURES.values())!r}):
            torch.npu.set_device(device)
            try:
                eval(code)
                torch.npu.synchronize()
                print("TAKEN")
            except RuntimeError as e:
                print("FAILED", str(e).replace(chr(10), " "))
        """,
        devices=len(FAILURES),
    )
    lines = [line for line in output.splitlines() if line.startswith(("TAKEN", "FAILED"))]
    assert status == 0 and len(lines) == len(FAILURES), output
    for rule, line in zip(FAILURES, lines, strict=True):
        assert rule in line


# ---- norms and cache writes of sparse latent attention


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(128,), (3, 16)])
def test_layer_norm(dtype, shape):
    x = (3 * torch.randn(7, *shape) + 1).to(dtype)
    weight, bias = torch.randn(*shape).to(dtype), torch.randn(*shape).to(dtype)
    for parts in ((weight, bias), (weight, None), (None, None)):
        floats = [None if p is None else p.float() for p in parts]
        wanted = torch.nn.functional.layer_norm(x.float(), shape, *floats, 1e-6)
        parts = [None if p is None else p.npu() for p in parts]
        assert_close(torch.nn.functional.layer_norm(x.npu(), shape, *parts, 1e-6), wanted)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_rows_are_written_to_their_indices(index_type):
    cache, rows = torch.zeros(6, 3).half(), torch.randn(3, 3).half()
    at = torch.tensor([[4], [0], [2]], dtype=index_type)
    on_npu = cache.npu()
    torch_npu.npu_scatter_nd_update_(on_npu, at.npu(), rows.npu())
    cache[at[:, 0].long()] = rows
    assert torch.equal(on_npu.cpu(), cache)
    refused_by(
        "aclnnScatterNdUpdate",
        "updates must be Half",
        lambda: torch_npu.npu_scatter_nd_update_(on_npu, at.npu(), rows.float().npu()),
    )
