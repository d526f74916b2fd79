"""Questions about device memory: limits, alignment, and values that a kernel must not read."""

from __future__ import annotations

import math

from dist_aclgraph.probe.question import ACCEPTED, Answer, Bench, Probe
from dist_aclgraph.probe.questions.operators import BLOCK, DIM, attention


def _too_much(bench: Bench) -> str:
    size = bench.npu.memory().total_bytes + (1 << 30)
    bench.torch.empty(size, dtype=bench.torch.int8, device="npu")
    return ACCEPTED


def _unaligned(bench: Bench) -> Answer:
    x = bench.torch.randn(1025)
    return bench.compare(x.npu()[1:] * 2, x[1:] * 2)


def _nan_behind_last_key(bench: Bench) -> str:
    torch = bench.torch
    query = torch.randn(1, 4, DIM).bfloat16().npu()
    cache = torch.randn(1, BLOCK, 2, DIM).bfloat16()
    cache[:, 20:] = math.nan
    out = attention(bench, query, cache.npu(), cache.npu(), [20])
    return "reaches the result" if bool(out.cpu().isnan().any()) else "does not reach the result"


def _copy_back(bench: Bench) -> Answer:
    x = bench.torch.randn(1 << 20)
    return bench.compare(x.npu(), x)


def _bad_memory(bench: Bench) -> str:
    return f"{len(bench.npu.bad_memory())} ranges"


PROBES = (
    Probe("memory.copy", "Do copies keep 4 MiB?", _copy_back, "equal", "quick"),
    Probe("memory.unaligned", "Is an unaligned view computed as others?", _unaligned, "equal"),
    Probe(
        "memory.nan_behind_last_key",
        "Does a NaN behind the last key reach attention's result?",
        _nan_behind_last_key,
        "reaches the result",
    ),
    Probe("memory.bad", "How many ranges of bad memory are listed?", _bad_memory, "0 ranges"),
    Probe("memory.too_much", "Is an allocation beyond all memory refused?", _too_much, "refused"),
)
