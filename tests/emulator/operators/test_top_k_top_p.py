"""npu_top_k_top_p sorts only a part of each row. Its results equal those of a full sort, bit by
bit.
"""

import pytest
import torch

ROWS, VOCAB = 4, 997


def by_sorting(logits, p=None, k=None):
    """Return the result of the documented formula, by a full sort, with sums in float64."""
    sorted_, order = torch.sort(logits.float(), dim=-1, stable=True)
    n = logits.shape[1]
    if k is not None:
        cut = (n - k.long()).clamp_min(0).unsqueeze(1)
        sorted_ = sorted_.masked_fill(sorted_ < sorted_.gather(1, cut), -torch.inf)
    if p is not None:
        sums = (sorted_.double() - sorted_[:, -1:]).exp().cumsum(-1)
        dropped = sums <= (1 - p.double().unsqueeze(1)) * sums[:, -1:]
        dropped[:, -1] = False
        sorted_ = sorted_.masked_fill(dropped, -torch.inf)
    return torch.empty_like(sorted_).scatter_(-1, order, sorted_).to(logits.dtype)


def some_logits(kind, seed):
    chance = torch.Generator().manual_seed(seed)
    normal = torch.randn(ROWS, VOCAB, generator=chance)
    return {
        "flat": normal * 0.1,
        "normal": normal,
        "peaked": normal * 8,
        "far": normal * 100,
        "equal": torch.zeros(ROWS, VOCAB),
        "ties": (normal * 3).round(),
        "forbidden": normal.masked_fill(normal < 0.5, -torch.inf),
        "lost": torch.full((ROWS, VOCAB), -torch.inf),
        "nan": normal.masked_fill(normal > 2.5, torch.nan),
        "infinite": normal.masked_fill(normal > 2.5, torch.inf),
    }[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    ["flat", "normal", "peaked", "far", "equal", "ties", "forbidden", "lost", "nan", "infinite"],
)
def test_the_removed_tokens_are_the_same_as_after_a_full_sort(kind, dtype):
    for seed in range(10):
        logits = some_logits(kind, seed).to(dtype)
        p = torch.tensor([0.01, 0.5, 0.9, 0.999], dtype=dtype)
        k = torch.tensor([1, 7, 50, 996], dtype=torch.int32)
        for asked in ({"p": p}, {"k": k}, {"p": p, "k": k}, {"k": k + VOCAB}):
            on_device = {name: value.npu() for name, value in asked.items()}
            found = torch.ops.npu.npu_top_k_top_p(
                logits.npu(), on_device.get("p"), on_device.get("k")
            )
            expected = by_sorting(logits, **asked)
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_near_ties_of_top_p_are_cut_as_by_a_sort():
    # Four equal logits give four probabilities of 0.25, and ``p`` is a multiple of 0.25. So a sum
    # of probabilities is equal to ``p``, and an error of rounding could remove or add a token.
    logits = torch.zeros(1, 4)
    for parts in range(1, 4):
        p = torch.tensor([parts / 4])
        found = torch.ops.npu.npu_top_k_top_p(logits.npu(), p.npu(), None).cpu()
        assert torch.equal(found, by_sorting(logits, p=p))
        assert found.isfinite().sum() == parts
