"""Tensors in the format FRACTAL_NZ, and the operators that read them, are compared with plain
torch.
"""

import contextlib

import pytest
import torch
import torch_npu

from tests.emulator.compare import refused, refused_by
from tests.emulator.operators.test_quant import HALVES, assert_int8

ND, FRACTAL_NZ = 2, 29


@contextlib.contextmanager
def internal_formats():
    torch.npu.config.allow_internal_format = True
    try:
        yield
    finally:
        torch.npu.config.allow_internal_format = False


def to_nz(tensor):
    with internal_formats():
        return torch_npu.npu_format_cast(tensor.npu(), FRACTAL_NZ)


def fixed():
    return torch.Generator().manual_seed(1)


def int8(*sizes):
    return torch.randint(-127, 128, sizes, dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensor", "storage"),
    [
        (int8(3, 48, 96), [3, 3, 3, 16, 32]),
        (int8(20, 70), [3, 2, 16, 32]),
        (torch.randn(32, 48).bfloat16(), [3, 2, 16, 16]),
    ],
)
def test_a_cast_changes_the_storage_and_neither_sizes_nor_values(tensor, storage):
    nz = to_nz(tensor)

    assert torch_npu.get_npu_format(nz) == FRACTAL_NZ
    assert nz.shape == tensor.shape and nz.stride() == tensor.stride()
    assert nz.untyped_storage().nbytes() == torch.Size(storage).numel() * tensor.element_size()
    assert torch.equal(nz.cpu(), tensor)
    assert torch.equal(torch_npu.npu_format_cast(nz, ND).cpu(), tensor)


def test_a_cast_keeps_nd_unless_internal_formats_are_allowed():
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(int8(32, 32).npu(), FRACTAL_NZ)) == ND


CAST = """
torch.npu.config.allow_internal_format = True
weight = torch.randint(-127, 128, (2, 20, 70), dtype=torch.int8)
nz = torch_npu.npu_format_cast(weight.npu(), 29)
print("FORMAT", int(torch_npu.get_npu_format(nz)), nz.untyped_storage().nbytes())
assert torch.equal(nz.cpu(), weight)
"""


@pytest.mark.skipif(not hasattr(torch.npu, "_sleep"), reason="torch_npu 2.13 has this path")
def test_cann_9_1_casts_without_the_graph_engine(run_script):
    # torch_npu reads the version of CANN once, when it is imported.
    status, output = run_script(CAST, fresh=True, cann="9.1.0", refuse="Identity")

    assert status == 0 and f"FORMAT 29 {2 * 32 * 96}" in output, output


def test_operators_for_nd_refuse_a_tensor_in_fractal_nz():
    nz = to_nz(int8(32, 64))

    refused("GE operator", lambda: nz + nz)


@pytest.mark.parametrize("inputs", [32, 40])
@pytest.mark.parametrize("dtype", HALVES)
def test_quantised_products_do_not_depend_on_the_format_of_their_weight(inputs, dtype):
    weight, rows = int8(inputs, 70), int8(4, inputs).npu()
    given = {"pertoken_scale": torch.rand(4).npu(), "bias": torch.randn(70).npu()}

    nd, nz = (
        torch_npu.npu_quant_matmul(
            rows, w, torch.rand(70, generator=fixed()).npu(), output_dtype=dtype, **given
        )
        for w in (weight.npu(), to_nz(weight))
    )

    assert torch.equal(nd.cpu(), nz.cpu())


def grouped(rows, weight):
    return torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        scale=[torch.rand(3, weight.shape[2], generator=fixed()).bfloat16().npu()],
        per_token_scale=[torch.rand(len(rows), generator=fixed()).npu()],
        group_list=torch.tensor([3, 0, 2]).npu(),
        group_list_type=1,
        group_type=0,
        split_item=3,
        output_dtype=torch.bfloat16,
    )[0]


def test_grouped_products_do_not_depend_on_the_format_of_their_weight():
    weight, rows = int8(3, 48, 96), int8(5, 48).npu()

    assert torch.equal(grouped(rows, weight.npu()).cpu(), grouped(rows, to_nz(weight)).cpu())


@pytest.mark.parametrize(("inputs", "out"), [(40, 96), (48, 80)])
def test_grouped_products_refuse_blocks_that_are_not_full(inputs, out):
    weight, rows = to_nz(int8(3, inputs, out)), int8(5, inputs).npu()

    refused_by("aclnnGroupedMatmulWeightNz", "does not fill", lambda: grouped(rows, weight))


def test_products_with_weights_in_fractal_nz_refuse():
    rows, name = int8(4, 32).npu(), "aclnnQuantMatmulWeightNz"

    def multiply(weight):
        scale, ones = torch.ones(weight.shape[-1]).npu(), torch.ones(4).npu()
        options = {"pertoken_scale": ones, "output_dtype": torch.bfloat16}
        return lambda: torch_npu.npu_quant_matmul(rows, weight, scale, **options)

    long = to_nz(int8(64, 32))
    refused_by(name, "contiguous", multiply(long.t()))
    refused_by(name, "other sizes", multiply(long[:32]))
    refused_by(name, "two dimensions", multiply(to_nz(int8(2, 32, 32))))
    refused_by(name, "x2 must be int8", multiply(to_nz(torch.zeros(32, 32).half())))


class Experts:
    """Rows in int8 for several experts, and the experts' matrices for gate and up."""

    def __init__(self, sizes=(3, 0, 9, 1), hidden=48, columns=128, rows=16):
        self.sizes, self.rows = sizes, int8(rows, hidden)
        self.scales, self.weight = torch.rand(rows), int8(len(sizes), hidden, columns)
        self.weight_scales = torch.rand(len(sizes), columns) / 100
        self.counts = torch.tensor(sizes)

    @property
    def used(self):
        return sum(self.sizes)

    def wanted(self, dtype=torch.float32):
        """Return SwiGLU of the products, without quantisation of the result: [used rows, columns /
        2].
        """
        parts = self.rows[: self.used].double().split(self.sizes)
        scales = self.weight_scales.to(dtype).float()
        sums = [p @ w.double() * s for p, w, s in zip(parts, self.weight, scales, strict=True)]
        left, right = (torch.cat(sums) * self.scales[: self.used, None]).float().chunk(2, -1)
        return torch.nn.functional.silu(left) * right

    def run(self, *, version=2, counts=None, **others):
        """Call the operator with these tensors; tensors in ``others`` replace tensors with the same
        names.
        """
        given = {"x": self.rows, "weight": self.weight, "scales": self.scales} | others
        weight = given["weight"]
        weight = to_nz(weight) if weight.device.type == "cpu" else weight
        weight_scales = given.get("weight_scales", self.weight_scales).npu()
        x, scales = given["x"].npu(), given["scales"].npu()
        if version == 1:
            ends = self.counts.cumsum(0).npu()
            return torch_npu.npu_grouped_matmul_swiglu_quant(x, weight, ends, weight_scales, scales)
        return torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x,
            [weight],
            [weight_scales],
            scales,
            (self.counts if counts is None else counts).npu(),
            group_list_type=given.get("list_type", 1),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", [1, 2])
def test_products_with_swiglu_and_quantisation(version, dtype):
    experts = Experts()

    values, scales = experts.run(version=version, weight_scales=experts.weight_scales.to(dtype))[:2]

    assert values.shape == (16, 64)
    used = experts.used
    assert_int8(values[:used], scales[:used], experts.wanted(dtype))


def test_group_lists_may_be_ends_and_inputs_may_have_padding():
    experts = Experts(hidden=40)

    values, scales = experts.run(counts=experts.counts.cumsum(0), list_type=0)

    assert_int8(values[: experts.used], scales[: experts.used], experts.wanted())


def test_products_with_swiglu_and_quantisation_refuse():
    experts, name = Experts(), "aclnnGroupedMatmulSwigluQuantWeightNzV2"

    def rule(text, **changes):
        refused_by(name, text, lambda: experts.run(**changes))

    nd = experts.weight.npu()
    first = "aclnnGroupedMatmulSwigluQuantWeightNZ"
    refused_by(first, "must have 5 dimensions", lambda: experts.run(version=1, weight=nd))
    rule("must be int8", weight=experts.weight.bfloat16())
    rule("x must be int8", x=experts.rows.float())
    rule("x_scale must be float32", scales=experts.scales.bfloat16())
    rule("group_list has 3", counts=experts.counts[:3])
    rule("group_list must be int64", counts=experts.counts.int())
    rule("is not 0 or 1", list_type=2)
    refused_by(name, "no multiple of 64", lambda: Experts(columns=96).run())
    refused_by(name, "at most 10240", lambda: Experts(columns=10304).run())
    refused("aclnnGroupedMatmulSwigluQuantV2", lambda: experts.run(weight=nd))


NEEDS_CANN_9 = """
torch.npu.config.allow_internal_format = True
weight = torch_npu.npu_format_cast(torch.zeros(2, 32, 64, dtype=torch.int8).npu(), 29)
x, scale = torch.zeros(4, 32, dtype=torch.int8).npu(), torch.ones(4).npu()
ends, scales = torch.tensor([1, 4]).npu(), torch.ones(2, 64).npu()
torch_npu.npu_grouped_matmul_swiglu_quant(x, weight, ends, scales, scale)
torch.npu.synchronize()
print("FIRST")
torch_npu.npu_grouped_matmul_swiglu_quant_v2(x, [weight], [scales], scale, ends)
"""


def test_cann_8_5_has_the_first_version_only(run_script):
    _, output = run_script(NEEDS_CANN_9, cann="8.5.0")

    assert "FIRST" in output and "CANN 8.5 does not have this operator" in output
