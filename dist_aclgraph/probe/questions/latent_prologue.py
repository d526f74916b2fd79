"""Questions about ``npu_mla_prolog_v3``, which prepares latent attention in int8."""

from __future__ import annotations

from functools import partial
from typing import Any

from dist_aclgraph.probe.question import (
    ACCEPTED,
    EQUAL,
    REFUSED,
    Answer,
    Bench,
    ByCann,
    Probe,
)

BFLOAT16 = 3e-2  # tolerance: device and host may round to different neighbouring int8 values
LATENT, ROTATED, PLAIN, HEADS, EPSILON = 512, 64, 128, 4, 1e-6
SLOTS = (5, -1, 18)  # slots of three tokens; nothing is written to slot -1


class _Inputs:
    """The inputs of a call, on the host."""

    def __init__(
        self,
        bench: Bench,
        hidden: int = 7168,
        rank: int = 1536,
        block: int = 16,
        plain: int = PLAIN,
    ) -> None:
        torch = bench.torch
        self.bench = bench
        shapes = {
            "dq": (hidden, rank),
            "uq_qr": (rank, HEADS * (plain + ROTATED)),
            "dkv_kr": (hidden, LATENT + ROTATED),
        }
        self.rows = torch.randint(-127, 128, (len(SLOTS), hidden), dtype=torch.int8)
        self.row_scales = torch.rand(len(SLOTS), 1) / 100
        self.weights = {
            name: torch.randint(-127, 128, shape, dtype=torch.int8)
            for name, shape in shapes.items()
        }
        self.scales = {name: torch.rand(1, shape[1]) / 1000 for name, shape in shapes.items()}
        self.keys = torch.randn(HEADS, plain, LATENT).bfloat16() / 16
        self.gammas = torch.randn(rank).bfloat16(), torch.randn(LATENT).bfloat16()
        angles = torch.rand(len(SLOTS), ROTATED // 2) * 6
        self.cos, self.sin = (
            torch.cat([table, table], -1).bfloat16() for table in (angles.cos(), angles.sin())
        )
        self.block = block

    def run(self) -> tuple[Any, ...]:
        """Run the operator on the device, and return its results."""
        torch, bench = self.bench.torch, self.bench
        caches = [torch.zeros(2, self.block, 1, d).bfloat16().npu() for d in (LATENT, ROTATED)]
        queries = torch.ops.npu.npu_mla_prolog_v3(
            self.rows.npu(),
            *(bench.to_fractal_nz(self.weights[name].npu()) for name in ("dq", "uq_qr")),
            self.keys.npu(),
            bench.to_fractal_nz(self.weights["dkv_kr"].npu()),
            *(gamma.npu() for gamma in self.gammas),
            self.sin.npu(),
            self.cos.npu(),
            *caches,
            cache_index=torch.tensor(SLOTS).npu(),
            dequant_scale_x=self.row_scales.npu(),
            **{f"dequant_scale_w_{name}": scale.npu() for name, scale in self.scales.items()},
            rmsnorm_epsilon_cq=EPSILON,
            rmsnorm_epsilon_ckv=EPSILON,
            weight_quant_mode=2,
        )
        return queries[0], queries[1], *caches

    def expected(self) -> list[Any]:
        """Return the results of ``run``, computed on the host."""
        torch = self.bench.torch
        kv = self._product("dkv_kr", self.rows, self.row_scales)
        latents, turned = self._normed(kv[:, :LATENT], 1), self._rotated(kv[:, None, LATENT:])
        low = self._normed(self._product("dq", self.rows, self.row_scales), 0)
        steps = low.abs().amax(-1, keepdim=True) / 127
        q = self._product("uq_qr", (low / steps).round(), steps)
        q = q.view(len(SLOTS), HEADS, PLAIN + ROTATED)
        plain = q[..., :PLAIN].bfloat16().float()
        query = torch.einsum("thd,hdw->thw", plain, self.keys.float())
        caches = [torch.zeros(2 * self.block, d) for d in (LATENT, ROTATED)]
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                caches[0][slot], caches[1][slot] = latents[token], turned[token, 0]
        return [query, self._rotated(q[..., PLAIN:]), *caches]

    def _product(self, name: str, rows: Any, scales: Any) -> Any:
        sums = rows.double() @ self.weights[name].double()
        return sums.float() * scales * self.scales[name]

    def _normed(self, x: Any, index: int) -> Any:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * (mean + EPSILON).rsqrt() * self.gammas[index].float()

    def _rotated(self, x: Any) -> Any:
        """Rotate pairs of neighbouring elements of [tokens, heads, 64]. The result contains the
        first elements of all pairs, then the second elements of all pairs.
        """
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = (t[:, None, : ROTATED // 2].float() for t in (self.cos, self.sin))
        return self.bench.torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def _queries_and_cache(bench: Bench) -> Answer:
    call = _Inputs(bench)
    answer = Answer(EQUAL)
    for got, want in zip(call.run(), call.expected(), strict=True):
        answer = bench.compare(got.view(want.shape), want, BFLOAT16)
        if answer.found != EQUAL:
            break
    return answer


def _accepts(bench: Bench, **sizes: int) -> str:
    _Inputs(bench, **sizes).run()
    return ACCEPTED


PROBES = (
    Probe(
        "model_calls.latent_prologue",
        "Is npu_mla_prolog_v3 in int8, with a slot of -1, as on the host (DeepSeek-V3)?",
        _queries_and_cache,
        ByCann(REFUSED, EQUAL),
        operator="aclnnMlaPrologV3WeightNz",
    ),
    Probe(
        "rules.prologue_hidden_4096",
        "Is npu_mla_prolog_v3 with hidden states of 4096 elements accepted?",
        partial(_accepts, hidden=4096),
        REFUSED,
        rule="hidden states have",
    ),
    Probe(
        "rules.prologue_head_192",
        "Is npu_mla_prolog_v3 with keys of 192 elements, without rotation, accepted (GLM-5)?",
        partial(_accepts, plain=192),
        REFUSED,
        rule="a key has",
    ),
    Probe(
        "rules.prologue_rank_2048",
        "Is npu_mla_prolog_v3 with query latents of 2048 elements accepted (GLM-5)?",
        partial(_accepts, rank=2048),
        REFUSED,
        rule="the latent of queries has",
    ),
    Probe(
        "rules.prologue_block_64",
        "Is npu_mla_prolog_v3 with blocks of 64 slots accepted?",
        partial(_accepts, block=64),
        REFUSED,
        rule="blocks have",
    ),
)
