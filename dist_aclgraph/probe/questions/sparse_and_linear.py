"""Compares the operators of sparse and of linear attention with the host."""

from __future__ import annotations

from functools import partial
from typing import Any

from dist_aclgraph.probe.question import DIFFERENT, EQUAL, Answer, Bench, Probe
from dist_aclgraph.probe.questions.operators import (
    BFLOAT16,
    BLOCK,
    DIM,
    LATENT,
    ROTATED,
    blocks_in_order,
)

LENGTHS = [40, 1000]  # KV lengths of two requests with one query each
COLUMNS = 8  # number of blocks of each request
TILE = 128  # number of values of a latent that share a scale
INDEX_HEADS, CHOSEN = 64, 64  # number of heads of DeepSeek-V3.2's indexer; number of chosen keys
KEY_HEADS, VALUE_HEADS = 4, 8  # numbers of heads of linear attention
DELTA = 6e-2  # tolerance: states are rounded to bfloat16 after each token


def _random(bench: Bench, *shape: int) -> Any:
    return bench.torch.randn(*shape).bfloat16()


def _ints(bench: Bench, *values: int) -> Any:
    return bench.torch.tensor(values, dtype=bench.torch.int32).npu()


def _indexer(bench: Bench) -> Answer:
    """Compare the scores of the chosen keys. The order of the keys does not matter."""
    torch = bench.torch
    query, weights = _random(bench, 2, INDEX_HEADS, DIM), torch.rand(2, INDEX_HEADS).bfloat16()
    keys = _random(bench, 2 * COLUMNS, BLOCK, 1, DIM)
    chosen = torch.ops.npu.npu_lightning_indexer(
        query.npu(),
        keys.npu(),
        weights.npu(),
        actual_seq_lengths_query=_ints(bench, 1, 2),
        actual_seq_lengths_key=_ints(bench, *LENGTHS),
        block_table=blocks_in_order(bench, keys, 2),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=CHOSEN,
        sparse_mode=3,
    )[0].cpu()
    for i, length in enumerate(LENGTHS):
        own = keys.view(2, -1, DIM)[i, :length].float()
        scores = weights[i].float() @ (query[i].float() @ own.t()).relu()
        want = scores.topk(min(length, CHOSEN)).values
        row = chosen[i, 0]
        found = row[: len(want)].long()
        if bool((row[len(want) :] != -1).any()) or len(set(found.tolist())) < len(want):
            return Answer(DIFFERENT, f"length {length}: {row.tolist()}")
        answer = bench.compare(scores[found].sort(descending=True).values, want, BFLOAT16)
        if answer.found != EQUAL:
            return answer
    return Answer(EQUAL)


def _sparse(bench: Bench) -> Answer:
    torch, heads, scale = bench.torch, 16, 0.05
    query, rotated = _random(bench, 2, heads, LATENT), _random(bench, 2, heads, ROTATED)
    keys, turned = (_random(bench, 2 * COLUMNS, BLOCK, 1, d) for d in (LATENT, ROTATED))
    chosen = torch.full((2, 1, CHOSEN), -1, dtype=torch.int32)
    for row, length in zip(chosen, LENGTHS, strict=True):
        count = min(length, CHOSEN)
        row[0, :count] = torch.randperm(length)[:count]
    latents = keys.npu()
    got = torch.ops.npu.npu_sparse_flash_attention(
        query.npu(),
        latents,
        latents,
        chosen.npu(),
        scale,
        block_table=blocks_in_order(bench, keys, 2),
        actual_seq_lengths_query=_ints(bench, 1, 2),
        actual_seq_lengths_kv=_ints(bench, *LENGTHS),
        query_rope=rotated.npu(),
        key_rope=turned.npu(),
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
    )[0]
    want = []
    for i, row in enumerate(chosen[:, 0].long()):
        k, r = (c.view(2, -1, c.shape[-1])[i][row[row >= 0]].float() for c in (keys, turned))
        scores = (query[i].float() @ k.t() + rotated[i].float() @ r.t()) * scale
        want.append(scores.softmax(-1) @ k)
    return bench.compare(got, torch.stack(want), BFLOAT16)


def _sparse_int8(bench: Bench, key_block: int = 1) -> Answer:
    """Compare the device's attention over int8 latents with the host's. The operator reads the
    scales from the rows of keys.

    Args:
        key_block: number of keys that one index stands for. If this number is 1, an indexer chooses
            keys. If it is larger, all keys are chosen.
    """
    torch, heads, scale = bench.torch, 16, 0.05
    query = _random(bench, 2, heads, LATENT + ROTATED)
    keys, turned = (_random(bench, 2 * COLUMNS, BLOCK, 1, d) for d in (LATENT, ROTATED))
    values, scales = torch.ops.npu.npu_dynamic_quant(keys.view(-1, TILE).npu())
    parts = (values.view(keys.shape), turned.npu(), scales.view(*keys.shape[:3], -1))
    rows = torch.cat([part.view(torch.int8) for part in parts], -1)
    chosen = torch.full((2, 1, CHOSEN), -1, dtype=torch.int32)
    seen = []
    for row, length in zip(chosen, LENGTHS, strict=True):
        count = min(-(-length // key_block), CHOSEN)
        order = torch.randperm(length) if key_block == 1 else torch.arange(length)
        row[0, :count] = order[:count]
        seen.append(order[: count * key_block])
    got = torch.ops.npu.npu_kv_quant_sparse_flash_attention(
        query.npu(),
        rows,
        rows,
        chosen.npu(),
        scale,
        2,
        2,
        block_table=blocks_in_order(bench, keys, 2),
        actual_seq_lengths_query=_ints(bench, 1, 2),
        actual_seq_lengths_kv=_ints(bench, *LENGTHS),
        sparse_block_size=key_block,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
        quant_scale_repo_mode=1,
        tile_size=TILE,
    )
    stored = (values.cpu().float() * scales.cpu().view(-1, 1)).view(keys.shape)
    want = []
    for i, keys_of_row in enumerate(seen):
        k, r = (c.view(2, -1, c.shape[-1])[i][keys_of_row].float() for c in (stored, turned))
        scores = (query[i].float() @ torch.cat([k, r], -1).t()) * scale
        want.append(scores.softmax(-1) @ k)
    return bench.compare(got, torch.stack(want), BFLOAT16)


def _sparse_of_shards(bench: Bench) -> Answer:
    """Compare the results and the log-sum-exps of attention without a block table. All keys of the
    cache belong to one request. The indices of the chosen keys are slots. Ranks that have shards of
    the cache call the operator in this way, and merge the results.
    """
    torch, heads, scale = bench.torch, 16, 0.05
    query, rotated = _random(bench, 2, heads, LATENT), _random(bench, 2, heads, ROTATED)
    keys, turned = (_random(bench, COLUMNS * BLOCK, 1, d) for d in (LATENT, ROTATED))
    slots = torch.stack([torch.randperm(len(keys))[:CHOSEN] for _ in range(2)]).int()
    slots[0, CHOSEN // 2 :] = -1
    latents = keys.npu()
    got, greatest, sums = torch.ops.npu.npu_sparse_flash_attention(
        query.npu(),
        latents,
        latents,
        slots.unsqueeze(1).npu(),
        scale,
        actual_seq_lengths_query=_ints(bench, 2),
        actual_seq_lengths_kv=_ints(bench, len(keys)),
        query_rope=rotated.npu(),
        key_rope=turned.npu(),
        layout_query="TND",
        layout_kv="TND",
        sparse_mode=0,
        attention_mode=2,
        return_softmax_lse=True,
    )
    want, logs = [], []
    for i, row in enumerate(slots.long()):
        k, r = (each[row[row >= 0], 0].float() for each in (keys, turned))
        scores = (query[i].float() @ k.t() + rotated[i].float() @ r.t()) * scale
        want.append(scores.softmax(-1) @ k)
        logs.append(scores.logsumexp(-1))
    answer = bench.compare(got, torch.stack(want), BFLOAT16)
    if answer.found != EQUAL:
        return answer
    return bench.compare((greatest + sums.log())[0], torch.stack(logs), BFLOAT16)


def _delta_inputs(bench: Bench, num_tokens: int) -> dict[str, Any]:
    torch = bench.torch

    def unit() -> Any:
        return torch.nn.functional.normalize(torch.randn(num_tokens, KEY_HEADS, DIM), dim=-1)

    return {
        "query": unit().bfloat16(),
        "key": unit().bfloat16(),
        "value": _random(bench, num_tokens, VALUE_HEADS, DIM),
        "beta": torch.rand(num_tokens, VALUE_HEADS).bfloat16(),
        "g": -torch.rand(num_tokens, VALUE_HEADS),
    }


def _delta_on_host(
    bench: Bench, inputs: dict[str, Any], tokens: range, state: Any
) -> tuple[Any, list[Any]]:
    """Return the results of some tokens, and the state after each of these tokens."""
    group, outs, states = VALUE_HEADS // KEY_HEADS, [], []
    state = state.float()
    for i in tokens:
        q, k = (
            inputs[name][i].float().repeat_interleave(group, 0)[..., None]
            for name in ("query", "key")
        )
        v, beta = inputs["value"][i].float()[..., None], inputs["beta"][i].float()[:, None, None]
        state = state * inputs["g"][i].exp()[:, None, None]
        state = state + beta * (v - state @ k) @ k.mT
        outs.append((state @ q)[..., 0] * DIM**-0.5)
        states.append(state)
    return bench.torch.stack(outs), states


def _on_device(inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Copy inputs to the device. Return query, key and value as a list, and the other inputs by
    name.
    """
    device = {name: value.npu() for name, value in inputs.items()}
    return [device.pop(name) for name in ("query", "key", "value")], device


def _delta_of_prompts(bench: Bench) -> Answer:
    torch, lengths = bench.torch, (65, 7)
    inputs = _delta_inputs(bench, sum(lengths))
    states = _random(bench, len(lengths), VALUE_HEADS, DIM, DIM)
    rows, others = _on_device(inputs)
    got, last = torch.ops.npu.npu_chunk_gated_delta_rule(
        *rows,
        **others,
        initial_state=states.npu(),
        actual_seq_lengths=_ints(bench, *lengths),
        scale=DIM**-0.5,
    )
    found = [
        _delta_on_host(bench, inputs, tokens, state)
        for tokens, state in zip((range(65), range(65, 72)), states, strict=True)
    ]
    answer = bench.compare(got, torch.cat([outs for outs, _ in found]), DELTA)
    if answer.found != EQUAL:
        return answer
    return bench.compare(last, torch.stack([after[-1] for _, after in found]), DELTA)


def _delta_of_decode(bench: Bench) -> Answer:
    """Verify two drafts of a request, and decode a token of another request."""
    torch = bench.torch
    inputs, states = _delta_inputs(bench, 4), _random(bench, 6, VALUE_HEADS, DIM, DIM)
    # ``starts``: each request's tokens, and the slot of the request's state before the step
    slots, starts = [5, 2, 4, 1], ((range(3), 2), (range(3, 4), 1))
    after, (rows, others) = states.npu(), _on_device(inputs)
    got = torch.ops.npu.npu_recurrent_gated_delta_rule(
        *rows,
        after,
        **others,
        scale=DIM**-0.5,
        actual_seq_lengths=_ints(bench, 3, 1),
        ssm_state_indices=_ints(bench, *slots),
        # the first request starts from the state in its second slot
        num_accepted_tokens=_ints(bench, 2, 1),
    )
    want, wanted_states = [], states.float()
    for tokens, slot in starts:
        outs, each = _delta_on_host(bench, inputs, tokens, states[slot])
        want.append(outs)
        for token, state in zip(tokens, each, strict=True):
            wanted_states[slots[token]] = state
    answer = bench.compare(got, torch.cat(want), DELTA)
    return answer if answer.found != EQUAL else bench.compare(after, wanted_states, DELTA)


PROBES = tuple(
    Probe(f"model_calls.{name}", f"Is {what} as on the host?", call, EQUAL, operator=operator)
    for name, what, call, operator in (
        (
            "indexer",
            f"npu_lightning_indexer with {CHOSEN} chosen keys (DeepSeek-V3.2)",
            _indexer,
            "aclnnLightningIndexer",
        ),
        (
            "sparse_attention",
            "npu_sparse_flash_attention (DeepSeek-V3.2)",
            _sparse,
            "aclnnSparseFlashAttention",
        ),
        (
            "sparse_attention_in_int8",
            "npu_kv_quant_sparse_flash_attention with latents in int8 (kv.dtype)",
            _sparse_int8,
            "aclnnKvQuantSparseFlashAttention",
        ),
        (
            "attention_in_int8_by_blocks",
            "npu_kv_quant_sparse_flash_attention of all keys, in blocks of 16 (kv.dtype)",
            partial(_sparse_int8, key_block=16),
            "aclnnKvQuantSparseFlashAttention",
        ),
        (
            "sparse_attention_of_shards",
            "npu_sparse_flash_attention with log-sum-exps and without pages (parallel.dcp)",
            _sparse_of_shards,
            "aclnnSparseFlashAttention",
        ),
        (
            "delta_of_prompts",
            "npu_chunk_gated_delta_rule (Qwen3-Next)",
            _delta_of_prompts,
            "aclnnChunkGatedDeltaRule",
        ),
        (
            "delta_of_decode",
            "npu_recurrent_gated_delta_rule with drafts (Qwen3-Next)",
            _delta_of_decode,
            "aclnnRecurrentGatedDeltaRule",
        ),
    )
)
