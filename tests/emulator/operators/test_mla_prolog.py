"""The operator that computes the inputs of latent attention is compared with plain torch in float32
and float64.
"""

import pytest
import torch
import torch_npu

from tests.emulator.compare import refused
from tests.emulator.operators.test_storage_formats import int8, to_nz

HIDDEN, RANK, WIDTH, PLAIN, ROPE = 6144, 1536, 512, 128, 64
HEADS, TOKENS, BLOCKS, BLOCK = 2, 5, 3, 16
EPSILON = 1e-6


def bfloat16(*sizes, scale=1.0):
    return (torch.randn(sizes) * scale).bfloat16()


class Case:
    """The inputs of one call of the operator, on the host. ``call`` runs the operator on the
    device.
    """

    def __init__(self, is_int8, hidden=HIDDEN, rank=RANK, heads=HEADS):
        torch.manual_seed(0)
        self.is_int8 = is_int8
        columns = {"dq": rank, "dkv_kr": WIDTH + ROPE, "uq_qr": heads * (PLAIN + ROPE)}
        rows = {"dq": hidden, "dkv_kr": hidden, "uq_qr": rank}
        if is_int8:
            self.x, self.x_scale = int8(TOKENS, hidden), torch.rand(TOKENS, 1) / 100
            self.weights = {name: int8(rows[name], n) for name, n in columns.items()}
            self.scales = {name: torch.rand(1, n) / 1000 for name, n in columns.items()}
        else:
            self.x, self.x_scale = bfloat16(TOKENS, hidden), None
            self.weights = {n: bfloat16(rows[n], c, scale=0.02) for n, c in columns.items()}
            self.scales = dict.fromkeys(columns)
        self.keys = bfloat16(heads, PLAIN, WIDTH, scale=0.05)
        self.norms = [bfloat16(rank), bfloat16(WIDTH)]
        self.cos, self.sin = bfloat16(TOKENS, ROPE), bfloat16(TOKENS, ROPE)
        self.caches = [torch.zeros(BLOCKS, BLOCK, 1, n).bfloat16() for n in (WIDTH, ROPE)]
        self.slots = torch.tensor([17, 3, -1, 40, 16])

    def call(self, **changes):
        """Return the two parts of the queries (latent and rotated), and the two caches after the
        call.
        """
        caches = [cache.npu() for cache in self.caches]
        weights = {f"weight_{name}": to_nz(weight) for name, weight in self.weights.items()}
        arguments = {
            "token_x": self.x.npu(),
            **weights,
            "weight_uk": self.keys.npu(),
            "rmsnorm_gamma_cq": self.norms[0].npu(),
            "rmsnorm_gamma_ckv": self.norms[1].npu(),
            "rope_sin": self.sin.npu(),
            "rope_cos": self.cos.npu(),
            "kv_cache": caches[0],
            "kr_cache": caches[1],
            "cache_index": self.slots.npu(),
            "rmsnorm_epsilon_cq": EPSILON,
            "rmsnorm_epsilon_ckv": EPSILON,
            "weight_quant_mode": 2 if self.is_int8 else 0,
        }
        if self.is_int8:
            arguments["dequant_scale_x"] = self.x_scale.npu()
            for name, scale in self.scales.items():
                arguments[f"dequant_scale_w_{name}"] = scale.npu()
        query, query_rope, *_ = torch_npu.npu_mla_prolog_v3(**{**arguments, **changes})
        return [t.cpu() for t in (query, query_rope, *caches)]

    def product(self, rows, name, row_scale):
        if not self.is_int8:
            return (rows.float() @ self.weights[name].float()).bfloat16().float()
        sums = (rows.double() @ self.weights[name].double()).float()
        return sums * row_scale * self.scales[name]

    def expected(self):
        """Compute the results of ``call`` with plain torch."""
        kv = self.product(self.x, "dkv_kr", self.x_scale)
        latents = norm(kv[:, :WIDTH], self.norms[1])
        keys = rotate(kv[:, None, WIDTH:], self.cos, self.sin)[:, 0]
        low, steps = norm(self.product(self.x, "dq", self.x_scale), self.norms[0]), None
        if self.is_int8:
            steps = low.abs().amax(1, keepdim=True) / 127
            low = (low / steps).round()
        else:
            low = low.bfloat16()
        heads = len(self.keys)
        q = self.product(low, "uq_qr", steps).view(TOKENS, heads, PLAIN + ROPE)
        plain = q[..., :PLAIN].bfloat16().float()
        query = torch.einsum("thd,hdw->thw", plain, self.keys.float())
        caches = [cache.clone().view(-1, cache.shape[-1]) for cache in self.caches]
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                caches[0][slot], caches[1][slot] = latents[token].bfloat16(), keys[token].bfloat16()
        caches = [new.view_as(old) for new, old in zip(caches, self.caches, strict=True)]
        return [query, rotate(q[..., PLAIN:], self.cos, self.sin), *caches]


def norm(rows, weight):
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON) * weight.float()


def rotate(x, cos, sin):
    """Rotate pairs of neighbouring elements of [tokens, heads, 64]. The result contains the first
    elements of all pairs, and then the second elements.
    """
    first, second = x[..., ::2], x[..., 1::2]
    halves = torch.cat([first, second], -1)
    turned = torch.cat([-second, first], -1)
    return halves * cos[:, None].float() + turned * sin[:, None].float()


@pytest.mark.parametrize("is_int8", [True, False])
def test_queries_and_cache_are_those_of_separate_operators(is_int8):
    case = Case(is_int8)

    found = case.call()

    for got, wanted in zip(found, case.expected(), strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        largest = wanted.float().abs().amax(-1, keepdim=True)
        # The operator may round a value of a query's latent to the neighbouring int8 value.
        assert ((got.float() - wanted.float()).abs() <= largest * 2**-6).all()
    assert not found[2].view(-1, WIDTH)[[0, 1, 2, 18, 47]].any(), "other slots are unchanged"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 4096}, "hidden states have 4096 elements, allowed are 6144, 7168 and 7680"),
        ({"rank": 1024}, "the latent of queries has 1024 elements, allowed are 1536"),
        ({"heads": 3}, "3 heads are no power of two up to 128"),
    ],
)
def test_sizes_that_the_kernel_lacks_are_refused(changes, words):
    refused(words, Case(True, **changes).call)


def test_weights_in_nd_are_refused():
    case = Case(True)

    weight = case.weights["dq"].npu()
    refused("weight_dq must be in FRACTAL_NZ", lambda: case.call(weight_dq=weight))


def test_blocks_of_other_sizes_are_refused():
    case = Case(True)
    case.caches = [torch.zeros(2, 64, 1, n).bfloat16() for n in (WIDTH, ROPE)]

    refused("blocks have 64 slots, allowed are 16 and 128", case.call)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_mode": "PA_NZ"}, "cache_mode PA_NZ is not emulated"),
        ({"kv_cache_quant_mode": 1}, "caches and queries in int8"),
        ({"query_norm_flag": True}, "query_norm are not emulated"),
        ({"weight_quant_mode": 1}, "weight_quant_mode 1 is not emulated"),
        ({"weight_quant_mode": 0}, "token_x must be contiguous BFloat16"),
        ({"cache_index": None}, "cache_index must be int64"),
        ({"dequant_scale_x": None}, "dequant_scale_x must be given"),
        ({"dequant_scale_w_uq_qr": None}, "int8 weights need scales"),
        ({"qc_qr_scale": 2.0}, "qc_qr_scale and kc_scale"),
    ],
)
def test_what_is_not_emulated_is_refused(changes, words):
    refused(words, lambda: Case(True).call(**changes))


def test_a_slot_outside_of_the_cache_stops_the_device(run_script):
    status, output = run_script(
        """
        from tests.emulator.operators.test_mla_prolog import Case
        case = Case(True)
        case.slots[1] = 48
        case.call()
        """
    )

    assert status != 0 and "index 48 lies outside the cache" in output
