"""Models with fused operators are compared with twins: the same models with separate operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common.one_rank import LaunchCount
from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.device.storage_formats import to_fractal_nz
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.errors import DeviceError
from dist_aclgraph.layers.int8_products import Int8GroupedProduct, Int8Linear, Int8SwigluProduct
from dist_aclgraph.layers.int8_rows import Int8Norm, quantised, swiglu_to_int8
from dist_aclgraph.layers.local_experts import ActivatedProduct, LocalExperts, swiglu
from dist_aclgraph.layers.norm import RmsNorm
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import make_prompts, make_reference
from tests.engine.runners import MAX_LEN, make_runner
from tests.engine.weights.test_int8_weights import int8_tensors
from tests.engine.weights.test_w8a8_models import W8A8, logits_of, rewrite
from tests.plans import decode_graph

HALF_A_STEP_OF_BFLOAT16 = 2.0**-9


@pytest.fixture
def rows(npu: Any) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 256, dtype=torch.bfloat16).to(npu.device)


def dequantised(product_rows: Any) -> Tensor:
    found = quantised(product_rows)
    values: Tensor = found.values.cpu().float() * found.scales.cpu()[:, None]
    return values


def test_a_norm_in_int8_and_its_twin_differ_by_a_step(npu: Any, rows: Tensor) -> None:
    norm = RmsNorm(torch.rand(256, dtype=torch.bfloat16).to(npu.device), 1e-6)
    residual = rows.flip(0)

    fused, fused_sum = Int8Norm(norm).after_sum(rows, residual)
    separate, sum_ = norm.after_sum(rows, residual)

    assert torch.equal(fused_sum.cpu(), sum_.cpu())
    step = fused.scales.cpu()[:, None]
    largest = dequantised(separate).abs().amax(-1, keepdim=True)
    bound = step + 4 * HALF_A_STEP_OF_BFLOAT16 * largest
    assert ((dequantised(fused) - dequantised(separate)).abs() <= bound).all()


def test_swiglu_in_int8_and_its_twin_differ_by_a_step(npu: Any, rows: Tensor) -> None:
    fused, separate = swiglu_to_int8(rows), swiglu(rows)

    step = fused.scales.cpu()[:, None]
    largest = dequantised(separate).abs().amax(-1, keepdim=True)
    bound = step + 2 * HALF_A_STEP_OF_BFLOAT16 * largest
    assert ((dequantised(fused) - dequantised(separate)).abs() <= bound).all()


def test_products_multiply_int8_rows_as_rows_that_they_quantise(npu: Any, rows: Tensor) -> None:
    device = npu.device
    weight = torch.randint(-127, 128, (256, 32), dtype=torch.int8).to(device)
    linear = Int8Linear(weight, torch.rand(32).to(device))
    scales = torch.rand(2, 32, dtype=torch.bfloat16).to(device)
    grouped = Int8GroupedProduct(torch.stack([weight, weight]), scales)
    counts = torch.tensor([9, 7]).to(device)

    assert torch.equal(linear(quantised(rows)).cpu(), linear(rows).cpu())
    assert torch.equal(grouped(quantised(rows), counts).cpu(), grouped(rows, counts).cpu())


def make_product(device: torch.device, experts: int, inputs: int, out: int) -> Int8GroupedProduct:
    weight = torch.randint(-127, 128, (experts, inputs, out), dtype=torch.int8)
    scale = torch.rand(experts, out, dtype=torch.bfloat16) / inputs
    return Int8GroupedProduct(weight.to(device), scale.to(device))


@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [16]])
def test_products_with_swiglu_in_int8_and_their_twin_differ_by_a_step(
    npu: Any, rows: Tensor, counts: list[int]
) -> None:
    product = make_product(npu.device, len(counts), rows.shape[1], 128)
    list_ = torch.tensor(counts).to(npu.device)

    fused = Int8SwigluProduct.replacing(product)(rows, list_)
    separate = ActivatedProduct(product)(rows, list_)

    # Only the twin rounds intermediate results to bfloat16: gate, up, and SwiGLU.
    step = fused.scales.cpu()[:, None]
    largest = dequantised(separate).abs().amax(-1, keepdim=True)
    bound = step + 6 * HALF_A_STEP_OF_BFLOAT16 * largest
    difference = (dequantised(fused) - dequantised(separate)).abs()
    assert (difference <= bound).all() and (difference <= step * 1.01).float().mean() > 0.95


def test_products_with_swiglu_take_no_memory_beside_their_weights(npu: Any) -> None:
    product = make_product(npu.device, 2, 256, 128)

    fused = Int8SwigluProduct.replacing(product)

    assert fused.weight.shape == product.weight.shape
    assert fused.weight.untyped_storage().nbytes() == product.weight.nbytes


def test_a_weight_that_stays_in_nd_is_an_error(npu: Any) -> None:
    vector = torch.zeros(64, dtype=torch.int8).to(npu.device)  # only matrices have the format

    with pytest.raises(DeviceError, match="leave expert_swiglu_quant and nz_weights out"):
        to_fractal_nz(vector)


WIDE = {"intermediate_size": 192}  # the fused operator after SwiGLU accepts this width
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", WIDE),
    ("Qwen3ForCausalLM", {}),  # the fused operator refuses this model's width
    ("Qwen3MoeForCausalLM", WIDE),
    ("DeepseekV3ForCausalLM", WIDE),
    ("GlmMoeDsaForCausalLM", WIDE),
    ("Qwen3NextForCausalLM", WIDE),
    ("KimiLinearForCausalLM", WIDE),
]


def decide(npu: Npu, chosen: Any) -> Fusions:
    config = make_config({"model": "m", "device": {"fusions": chosen}})
    return Fusions.decide(config, Chip(npu.name, npu.cann), installed_name())


# For each fusion, the number of launches that it saves per place in the model. Each fusion that is
# not in this table saves one launch.
SAVED = {"expert_swiglu_quant": 2, "nz_weights": 0}


def num_saved(fusions: Fusions) -> int:
    """Return the number of launches that all fusions in the report save in a step."""
    used = [item for item in fusions.report().items() if item[1].startswith("in ")]
    return sum(SAVED.get(name, 1) * int(text.split()[1]) for name, text in used)


@pytest.mark.parametrize(("architecture", "changes"), MODELS)
def test_each_place_in_the_report_saves_launches(
    npu: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    make_reference(architecture, tmp_path, **changes)
    counts, graph = {}, decode_graph(4)

    for chosen in ("none", "auto"):
        fusions = decide(npu, chosen)
        runner = make_runner(npu, tmp_path, 4, [graph], settings=W8A8, fusions=fusions)
        runner.warm_up(graph)
        launches = LaunchCount()
        with launches:
            runner.capture(graph)
        counts[chosen] = launches.count
        runner.close()

    assert counts["none"] - counts["auto"] == num_saved(fusions) > 2, fusions.report()


def logits_with(npu: Npu, directory: Path, fusions: Fusions) -> Tensor:
    """Return a prompt's logits from a model with weights in int8 and with ``fusions``."""
    spec, (prompt,) = read_model_spec(directory), make_prompts([40])
    checkpoint = Checkpoint(directory, torch.bfloat16, quantises=True, names=spec.names)
    model = Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=MAX_LEN, fusions=fusions)
    return logits_of(npu, model, prompt, torch.bfloat16)


def test_the_storage_format_of_weights_does_not_change_results(npu: Any, tmp_path: Path) -> None:
    make_reference("Qwen3MoeForCausalLM", tmp_path, **WIDE)
    fusions = decide(npu, ["nz_weights"])

    logits = logits_with(npu, tmp_path, fusions)

    assert fusions.report()["nz_weights"].startswith("in ")
    assert torch.equal(logits, logits_with(npu, tmp_path, Fusions.none()))


@pytest.mark.parametrize(("architecture", "changes"), MODELS[:4])
def test_logits_stay_near_those_of_separate_operators(
    npu: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    make_reference(architecture, tmp_path, **changes)

    twin, fused = (logits_with(npu, tmp_path, decide(npu, name)) for name in ("none", "auto"))

    # Fused operators do not round to int8 in the same way as separate operators. This difference
    # adds an error as large as the rounding error of int8 itself.
    assert 0 < (fused - twin).norm() < 0.12 * twin.norm()


def rows_of_norm(rows: Tensor) -> Tensor:
    norm = Int8Norm(RmsNorm(torch.ones_like(rows[0]), 1e-6))
    return dequantised(norm.after_sum(rows, rows.clone())[0])


def rows_of_swiglu(rows: Tensor) -> Tensor:
    return dequantised(swiglu_to_int8(rows))


def rows_of_experts(rows: Tensor) -> Tensor:
    device, width = rows.device, rows.shape[1]
    gate_up, down = (make_product(device, 1, width, out) for out in (2 * width, width))
    inner = ActivatedProduct(gate_up, swiglu_to_int8)
    return run_experts(rows, LocalExperts(inner, down, 0, 1, quantises_sorted=True))


def rows_of_fused_experts(rows: Tensor) -> Tensor:
    device, width = rows.device, rows.shape[1]
    gate_up, down = (make_product(device, 1, width, out) for out in (2 * width, width))
    inner = Int8SwigluProduct.replacing(gate_up)
    return run_experts(rows, LocalExperts(inner, down, 0, 1, quantises_sorted=True))


def run_experts(rows: Tensor, local: LocalExperts) -> Tensor:
    device = rows.device
    experts = torch.zeros(len(rows), 1, dtype=torch.int32, device=device)
    return local(rows, experts, torch.ones(experts.shape).to(device), None).cpu()


@pytest.mark.parametrize(
    "operator", [rows_of_norm, rows_of_swiglu, rows_of_experts, rows_of_fused_experts]
)
def test_a_nan_stays_in_its_row_and_a_row_of_zeros_gives_zeros(
    npu: Any, rows: Tensor, operator: Callable[[Tensor], Tensor]
) -> None:
    rows[3, 5], rows[4] = torch.nan, 0

    found = operator(rows)

    assert found.isnan().all(1).tolist() == [row == 3 for row in range(16)]
    assert not found.isnan().any(1)[[0, 1, 2, *range(4, 16)]].any()
    assert (found[4] == 0).all() and (found[5] != 0).any()


INPUTS = ("q_a_proj", "kv_a_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize(
    ("is_input", "report"),
    [
        (
            True,
            {
                "norm_quant": "in 3 places",
                "routing_quant": "in 2 places",
                "nz_weights": "in 7 places, not in 1 with matrices of 388 outputs, which is no "
                "multiple of 32",
            },
        ),
        (
            False,
            {
                "swiglu_quant": "in 4 places, not in 1 with rows of 194, which is no multiple of "
                "32",
                "nz_weights": "in 10 places",
            },
        ),
    ],
)
def test_operators_follow_the_matrices_that_a_checkpoint_stores_in_int8(
    npu: Any, deepseek: Path, tmp_path: Path, *, is_input: bool, report: dict[str, str]
) -> None:
    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        if any(part in name for part in INPUTS) != is_input:
            return {name: weight}
        return int8_tensors(weight, name.removesuffix(".weight"))

    checkpoint = Checkpoint(rewrite(deepseek, tmp_path, quantise, {}), torch.bfloat16)
    spec, (prompt,) = read_model_spec(tmp_path), make_prompts([40])
    fusions = decide(npu, "auto")
    model = Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=MAX_LEN, fusions=fusions)

    assert fusions.report() == report
    assert logits_of(npu, model, prompt, torch.bfloat16).isfinite().all()
