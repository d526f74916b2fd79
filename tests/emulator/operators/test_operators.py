"""Every plain operator is compared with ATen on the CPU."""

from typing import Any

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.emulator.compare import FLOATS

torch.manual_seed(0)
X, Y = torch.randn(6, 10), torch.randn(6, 10)
POSITIVE, OTHER = X.abs() + 0.1, Y.abs() + 0.2
MASK = X > 0
INTS, SMALL = torch.randint(1, 50, (5, 7)), torch.randint(1, 9, (5, 7))
ROWS = torch.tensor([4, 0, 2, 2])
DISTINCT = torch.tensor([0, 2, 3])
PLACES = torch.randint(0, 6, (3, 10))


def on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.npu()
    return [on_device(v) for v in value] if isinstance(value, list) else value


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.allclose(
            got.cpu().double(), want.double(), atol=tolerance, rtol=tolerance, equal_nan=True
        )
    elif isinstance(want, (tuple, list)):
        for g, w in zip(got, want, strict=True):
            assert_same(g, w, tolerance)
    else:
        assert got == want


def check(function, *arguments, tolerance: float = 1e-5) -> None:
    want = function(*arguments)
    assert_same(function(*[on_device(a) for a in arguments]), want, tolerance)


def written(tensor, index, value):
    copy = tensor.clone()
    copy[index] = value
    return copy


UNARY = [
    "neg",
    "abs",
    "exp",
    "sqrt",
    "rsqrt",
    "sigmoid",
    "tanh",
    "sin",
    "cos",
    "log",
    "ceil",
    "floor",
    "round",
    "sign",
    "reciprocal",
    "isnan",
    "isfinite",
    "isinf",
    "logical_not",
    "relu",
]
BINARY = [
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "remainder",
    "floor_divide",
    "maximum",
    "minimum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "fmod",
    "logical_and",
    "logical_or",
    "logical_xor",
]
INTEGER = [
    "add",
    "sub",
    "mul",
    "remainder",
    "floor_divide",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
]
NO_SCALAR = {"maximum", "minimum", "logical_and", "logical_or", "logical_xor"}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    check(getattr(torch, name), POSITIVE)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    function = getattr(torch, name)
    check(function, POSITIVE, OTHER)
    if name not in NO_SCALAR:
        check(lambda a: function(a, 0.7), POSITIVE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", INTEGER)
def test_integers(name, dtype):
    function = getattr(torch, name)
    check(function, INTS.to(dtype), SMALL.to(dtype))
    check(lambda a: function(a, 3), INTS.to(dtype))


@pytest.mark.parametrize(
    "name",
    [
        "add_",
        "sub_",
        "mul_",
        "div_",
        "clamp_min_",
        "clamp_max_",
        "remainder_",
        "pow_",
        "eq_",
        "gt_",
        "fill_",
    ],
)
def test_in_place(name):
    check(lambda a: getattr(a.clone(), name)(1.5), POSITIVE)


@pytest.mark.parametrize(
    "name", ["exp_", "sqrt_", "neg_", "sigmoid_", "abs_", "log_", "zero_", "tanh_"]
)
def test_in_place_unary(name):
    check(lambda a: getattr(a.clone(), name)(), POSITIVE)


REDUCTIONS = {
    "sum": lambda a: (a.sum(), a.sum(-1), a.sum(0, keepdim=True)),
    "mean": lambda a: (a.mean(), a.mean(-1)),
    "extrema": lambda a: (a.max(), a.min(), a.max(-1), a.min(0), a.amax(-1), a.amin(0)),
    "max of NaN": lambda a: a.masked_fill(a > a.mean(), torch.nan).max(-1),
    "argmax": lambda a: (a.argmax(-1), a.argmax(0), a.argmax(-1, keepdim=True), a.argmin(-1)),
    "cumsum": lambda a: (a.cumsum(-1), a.cumsum(0)),
    "logsumexp": lambda a: a.logsumexp(-1),
    "norm": lambda a: a.norm(),
    "std": lambda a: a.std(-1),
    "prod": lambda a: a.prod(-1),
    "softmax": lambda a: (a.softmax(-1), a.softmax(0), a.log_softmax(-1)),
    "sorting": lambda a: (a.topk(3, -1), a.sort(-1, descending=True), a.argsort(-1)),
}


@pytest.mark.parametrize("name", ["log", "log1p"])
@pytest.mark.parametrize("first", [0x00000001, 0x3F000000, 0xBF7FFF00])  # tiny, near 1, near -1
def test_logarithms_are_exact_to_the_last_places(name: str, first: int) -> None:
    bits = torch.arange(first, first + 5000) - (1 << 32) * (first >= 1 << 31)
    ends = torch.tensor([0.0, -1.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan, 3e38, -1e-8])
    x = torch.cat([bits.to(torch.int32).view(torch.float32), ends, POSITIVE.flatten()])
    want = getattr(x.double(), name)()

    got = getattr(x.npu(), name)().cpu().double()

    assert torch.allclose(got, want, rtol=4e-7, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("name", ["sub_", "div_", "add_", "mul_"])
def test_an_operand_may_be_a_part_of_the_result(name: str) -> None:
    device = POSITIVE.npu()
    want = getattr(torch, name[:-1])(POSITIVE[:, 1:], POSITIVE[:, :-1])

    getattr(device[:, 1:], name)(device[:, :-1])

    assert_same(device[:, 1:], want, 1e-6)


def test_quotients_of_integers_are_cut_to_an_integer_result() -> None:
    """As in aclnn_div.cpp, the quotient is computed in floats, and then cut to an integer. PyTorch
    refuses an integer result on CPUs.
    """
    ints, others = torch.tensor([7, -7, 6], dtype=torch.int32), torch.tensor([2, 2, 3])

    got = ints.npu().div_(others.to(torch.int32).npu())

    assert got.cpu().tolist() == [3, -3, 2]


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_comparison_with_a_number_treats_nan_and_rounding_as_torch(name: str) -> None:
    x = torch.cat([X.flatten(), torch.tensor([0.1, torch.nan, torch.inf, -torch.inf, 0.0, -0.0])])
    for number in (0.1, 0, torch.inf, torch.nan):
        check(lambda a, number=number: getattr(a, name)(number), x)
        check(lambda a, number=number: getattr(a, name)(number), x[::3])


@pytest.mark.parametrize("place", [0, 8, 1001, 1002])
def test_the_greatest_of_a_wide_row_may_be_anywhere(place: int) -> None:
    x = torch.randn(3, 1003).clamp_(max=3)
    x[:, place] = torch.tensor([4.0, torch.inf, torch.nan])

    check(lambda a: a.argmax(-1), x)
    check(lambda a: a.argmax(-1), torch.full((2, 1003), -torch.inf))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name):
    check(REDUCTIONS[name], X)


def test_truth():
    check(lambda m: (m.any(), m.all(), m.any(-1), m.all(0), m.sum(), ~m), MASK)
    check(lambda a, b: (a & b, a | b, a ^ b), MASK, Y > 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(dtype):
    x, y = X.to(dtype), Y.to(dtype)
    bias = y[:, 0].contiguous()
    check(lambda a, b: a @ b.t(), x, y, tolerance=5e-2)
    check(lambda a, b: a.view(3, 2, 10) @ b.t().contiguous(), x, y, tolerance=5e-2)
    check(functional.linear, x.view(2, 3, 10), y, tolerance=5e-2)
    check(functional.linear, x, y, bias, tolerance=5e-2)
    check(torch.bmm, x.view(2, 3, 10), y.view(2, 10, 3), tolerance=5e-2)
    check(torch.mv, x, y[0], tolerance=5e-2)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12, 13, 40, 65, 200])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_of_every_path(rows, transposed):
    a, b = torch.randn(rows, 75), torch.randn(133, 75)
    b = b if transposed else b.t().contiguous().t()
    check(lambda x, w: x @ w.t(), a, b, tolerance=1e-4)
    check(lambda x, w: x @ w.t(), a.bfloat16(), b.bfloat16(), tolerance=5e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_and_softmax_of_half_types(dtype):
    check(lambda a: (a.float(), a.to(torch.int32)), X.to(dtype))
    check(lambda a: a.to(dtype), X)
    check(lambda a: (a.softmax(-1), a.log_softmax(-1)), X.to(dtype), tolerance=2e-2)
    check(lambda a: a.softmax(-1, dtype=torch.float32), X.to(dtype))
    check(lambda a: (a.argmax(-1), a.max(-1), a.topk(3, -1)), X.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_by_index(dtype):
    rows = ROWS.to(dtype)
    check(lambda a, i: functional.embedding(i, a), X, rows)
    check(lambda a, i: a.index_select(0, i), X, rows)
    check(lambda a, i: a.index_select(1, i), X, rows)
    check(lambda a, i: functional.embedding(i, a), X.t(), rows)


INDEXING = {
    "gather": (lambda a, i: a.gather(0, i), X, PLACES),
    "scatter": (lambda a, i, b: a.scatter(0, i, b), X, PLACES[:1], Y[:1]),
    "scatter value": (lambda a, i: a.clone().scatter_(0, i, 3.0), X, PLACES),
    "scatter_add": (lambda a, i, b: a.scatter_add(0, i, b), X, PLACES, Y[:3]),
    "index": (lambda a, i: (a[i], a[:, i], a[i, i]), X, ROWS),
    "boolean index": (lambda a, m: a[m], X, MASK),
    "index_put": (written, X, DISTINCT, Y[:3]),
    "index_put of a mask": (lambda a, m: written(a, m, 0.0), X, MASK),
    "index_add": (lambda a, i, b: a.clone().index_add_(0, i, b), X, DISTINCT, Y[:3]),
    "index_copy": (lambda a, i, b: a.clone().index_copy_(0, i, b), X, DISTINCT, Y[:3]),
    "index_fill": (lambda a, i: a.clone().index_fill_(0, i, 2.0), X, DISTINCT),
    "where": (torch.where, MASK, X, Y),
    "where of NaN": (torch.where, MASK, X * torch.nan, -Y),
    "where of int32": (torch.where, MASK, X.int(), Y.int()),
    "where of bfloat16": (torch.where, MASK, X.bfloat16(), Y.bfloat16()),
    "where of rows": (torch.where, MASK[:1], X, Y[:, :1]),
    "where scalar": (lambda a, m: torch.where(m, a, -torch.inf), X, MASK),
    "masked_fill": (lambda a, m: (a.masked_fill(m, -1), a.clone().masked_fill_(m, 2)), X, MASK),
    "masked_select": (torch.masked_select, X, MASK),
    "nonzero": (torch.nonzero, MASK),
    "one_hot": (lambda i: functional.one_hot(i, 6), ROWS),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name):
    check(*INDEXING[name])


SHAPES = {
    "cat": (lambda a, b: (torch.cat([a, b], -1), torch.cat([a, b[:2]], 0)), X, Y),
    "stack": (lambda a, b: torch.stack([a, b], 1), X, Y),
    "split": (lambda a: [t.contiguous() for t in a.split([3, 3, 4], -1)], X),
    "transpose": (lambda a: a.view(2, 3, 10).permute(2, 0, 1).contiguous(), X),
    "strided": (lambda a: (a[:, ::2].clone(), a[1::2].contiguous(), a[:, 1:9:3].bfloat16()), X),
    "expand": (lambda a: (a[:1].expand(4, 10).contiguous(), a.repeat(2, 3)), X),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 0), X),
    "triangles": (lambda a: (a.triu(1), a.tril(), a.flip(0), a.roll(1, 0)), X),
    "clamp": (lambda a: (a.clamp(-0.5, 0.5), a.clamp(min=0), a.clamp(max=0)), X),
    "clamp tensor": (lambda a, b: a.clamp(min=b), X, Y),
    "silu": (lambda a: functional.silu(a), X),
    "write into a slice": (lambda a, b: written(a, (slice(None), slice(0, 3)), b[:, :3]), X, Y),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    check(*SHAPES[name])


def test_out_variants():
    out = torch.empty(6, 10, device="npu")
    assert_same(torch.add(X.npu(), Y.npu(), out=out), X + Y, 1e-6)
    product = torch.empty(6, 6, device="npu")
    assert_same(torch.mm(X.npu(), Y.t().npu(), out=product), X @ Y.t(), 1e-5)


def test_random_numbers_follow_the_seed():
    def draw():
        # Before release 2.13, a failed capture makes torch_npu's default generator unusable.
        given = {"generator": torch.Generator("npu").manual_seed(7)}
        uniform = torch.rand(1000, device="npu", **given)
        exponential = torch.empty(1000, device="npu").exponential_(**given)
        normal = torch.randn(1000, device="npu", **given)
        chosen = torch.multinomial(torch.tensor([[0.0, 1.0, 3.0]] * 500).npu(), 1, **given)
        return [t.cpu() for t in (uniform, exponential, normal, chosen)]

    first, second = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    uniform, exponential, normal, chosen = first
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.05
    assert exponential.min() > 0 and abs(exponential.mean() - 1) < 0.15
    assert abs(normal.mean()) < 0.15 and abs(normal.std() - 1) < 0.1
    assert chosen.min() == 1 and 0.6 < (chosen == 2).float().mean() < 0.9


def test_pinned_copies_both_ways():
    host = torch.arange(1000.0).pin_memory()
    device = torch.empty(1000, device="npu")
    device.copy_(host, non_blocking=True)
    back = torch.empty(1000).pin_memory()
    back.copy_(device, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, host)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_integers_are_copied_and_set_to_zero(dtype):
    values = torch.tensor([[0, 1, 2], [40_000, 65_535, 9]]).to(dtype)

    assert torch.equal(values.npu()[:, ::2].clone().cpu(), values[:, ::2])
    assert torch.equal(torch.zeros_like(values.npu()).cpu(), torch.zeros_like(values))


def test_lists_of_tensors_are_copied_in_one_call():
    given = [X, Y[:, ::2], INTS]
    targets = [torch.zeros_like(t, device="npu") for t in given]

    torch._foreach_copy_(targets, [t.npu() for t in given])

    for target, want in zip(targets, given, strict=True):
        assert torch.equal(target.cpu(), want)


def test_an_operator_of_atb_fails_with_its_name():
    state, slots = torch.zeros(2, 1, 16).half(), torch.zeros(2, dtype=torch.int32)
    cache = torch.zeros(4, 128, 1, 16).half()

    with pytest.raises(RuntimeError, match="ReshapeCacheOperation CreateOperation failed"):
        torch_npu._npu_reshape_and_cache(
            state.npu(), state.npu(), cache.npu(), cache.npu(), slots.npu()
        )
        torch.npu.synchronize()


def test_printing():
    assert "npu" in str(torch.ones(2, device="npu"))


def test_an_operator_that_is_not_emulated_fails_with_its_name():
    with pytest.raises(RuntimeError, match="aclnnErfinv is not emulated"):
        torch.erfinv(X.npu())


# ---- differences from torch on a CPU, and refusals


def test_gelu_is_the_form_with_tanh_whatever_is_asked_for():
    want = functional.gelu(X, approximate="tanh")
    for asked in ("none", "tanh"):
        assert torch.allclose(functional.gelu(X.npu(), approximate=asked).cpu(), want, atol=1e-6)


@pytest.mark.parametrize(
    "call,refusal",
    [
        (lambda a: torch.exp(a), "aclnnExp: "),
        (lambda a: torch.ceil(a.bool()), "aclnnCeil: the result must be a float, got Bool"),
        (lambda a: torch.neg(a.to(torch.uint8)), "aclnnNeg: Byte is not among the types"),
        (
            lambda a: a.char().index_fill_(0, a[0].long(), 1),
            "aclnnInplaceIndexFill: self must be float32, float16, bfloat16, int32, int64 or bool",
        ),
        (lambda a: torch.baddbmm(a[None], a[None], a[None]), "batched product of"),
        (lambda a: torch.cat([a.to(torch.complex64)] * 2), "complex64 is not emulated"),
        (lambda a: a.to(torch.complex64) + 1, "complex64 is not emulated"),
        (lambda a: a.to(torch.uint16) + 1, "uint16, uint32 and uint64 are emulated for copies"),
        (lambda a: a.to(torch.uint32) + 1, "uint16, uint32 and uint64 are emulated for copies"),
        (lambda a: a.cpu().to(torch.uint64).npu().sum(), "uint64 are emulated for copies only"),
    ],
)
def test_types_that_an_operator_has_not_are_refused_by_name(call, refusal):
    whole = torch.ones(3, 3, dtype=torch.int32)
    with pytest.raises(RuntimeError) as error:
        call(whole.npu())
    assert refusal in str(error.value)


EMPTY = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[x > 99],
        lambda x, i: x[(x > 99)[:, 0]],
        lambda x, i: written(x, i, 9.0),
        lambda x, i: x.clone().index_put_(((x > 99)[:, 0],), x.new_ones(()), accumulate=True),
        lambda x, i: written(x.sum(), x.sum() != x.sum(), 0.0),
    ],
)
@pytest.mark.parametrize("x", [X, X.long()], ids=["float32", "int64"])
def test_indices_of_no_elements(call, x):
    check(call, x, EMPTY)


def test_an_empty_index_can_be_combined_with_another_index():
    # The test changes no tensor of integers: in such a tensor, an empty index would look like a
    # whole dimension.
    check(lambda x, i: x.clone().index_put_((i, i.new_ones(1)), x.new_full((), 9)), X, EMPTY)


@pytest.mark.parametrize("a,b", [((5, 5, 0), (0, 5)), ((5, 0, 3), (3, 4)), ((2, 3, 0), (2, 0, 4))])
def test_products_of_nothing_are_zeros(a, b):
    check(torch.matmul, torch.ones(a), torch.ones(b))


def test_whole_numbers_of_linspace_are_rounded_as_torch_does():
    check(lambda start: torch.linspace(start, 117, 50, dtype=torch.int64, device=start.device),
          torch.tensor(-3.7))  # fmt: skip
