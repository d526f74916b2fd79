"""The logits of whole models in int8 are compared with those of transformers in float32, and steps
with graphs are compared with eager steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.checkpoints import make_prompts, make_reference
from tests.engine.prompt_steps import prompt_step
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, Sequences, make_runner
from tests.engine.weights.test_fp8_weights import quantise as to_fp8
from tests.engine.weights.test_int8_weights import int8_tensors
from tests.plans import make_plan

W8A8 = {"dtype": "bfloat16", "quantization": "w8a8"}
BFLOAT16 = {"dtype": "bfloat16"}
FP8_CONFIG = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
KEPT = ("embed_tokens", "lm_head", "norm", ".gate.", "kv_b_proj", "weights_proj", "eh_proj")
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {}),
    ("Qwen2ForCausalLM", {}),  # this model has biases
    ("Qwen3MoeForCausalLM", {}),
    ("DeepseekV3ForCausalLM", {}),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False}),  # outputs are reordered while loading
    # In this model, outputs are reordered, matrices have other names, and all layers have experts.
    ("MiniMaxM2ForCausalLM", {"num_hidden_layers": 2}),
    # The prompt has fewer keys than index_topk, so attention chooses all keys. With more keys, a
    # rounded score could change the choice.
    ("GlmMoeDsaForCausalLM", {"index_topk": 64}),
]


@pytest.fixture(scope="module", params=MODELS)
def model(npu: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    architecture, changes = request.param
    return directory, make_reference(architecture, directory, **changes)


def load(npu: Npu, directory: Path, *, quantises: bool, dtype: torch.dtype) -> Decoder:
    spec = read_model_spec(directory)
    checkpoint = Checkpoint(directory, dtype, quantises=quantises, names=spec.names)
    return Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=MAX_LEN)


def logits_of(npu: Npu, model: Decoder, prompt: list[int], dtype: torch.dtype) -> Tensor:
    """Return the logits at all positions of a prompt. The prompt uses the blocks 1 and 2."""
    n = len(prompt)
    positions = torch.arange(n, dtype=torch.int32, device=npu.device)
    table, slots = np.array([[1, 2]], np.int32), torch.arange(n, dtype=torch.int32) + BLOCK_SIZE
    steps = AttentionSteps(model.kind, ContextPlace(Shards(BLOCK_SIZE)), npu)
    metadata = steps.of_step(*prompt_step(npu, [n], [n], table, slots))
    with torch.inference_mode():
        hidden = model.forward(
            torch.tensor(prompt, dtype=torch.int32, device=npu.device),
            positions,
            slots.to(npu.device),
            model.make_caches(CacheRoom(3, BLOCK_SIZE, dtype)),
            metadata,
        )
        return model.logits(hidden).cpu().float()


def is_quantised(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not any(kept in name for kept in KEPT)


def rewrite(directory: Path, target: Path, quantise: Any, config: dict[str, Any]) -> Path:
    """Write a checkpoint to ``target``, with some of its matrices quantised by ``quantise``."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        made = quantise(name, tensor) if is_quantised(name, tensor) else {name: tensor}
        tensors |= {key: value.contiguous() for key, value in made.items()}
    save_file(tensors, target / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(text | config))
    return target


def fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    values, scales = to_fp8(weight)
    return {name: values, f"{name}_scale_inv": scales}


def generate(
    npu: Npu,
    directory: Path,
    settings: dict[str, Any],
    *,
    in_graphs: bool = False,
    fusions: Fusions | None = None,
) -> list[list[int]]:
    plan = make_plan(4)
    order = plan.capture_order
    runner = make_runner(npu, directory, 4, order, settings=settings, fusions=fusions)
    graph = None
    if in_graphs:
        (graph,) = plan.capture_order
        runner.warm_up(graph)
        runner.capture(graph)
        runner.commit(graph)
    sequences = Sequences(runner, make_prompts([20, 3, 33]))
    sequences.prefill()
    for _ in range(6):
        sequences.decode(graph)
    return sequences.new


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def test_logits_are_near_those_of_floats(npu: Any, model: tuple[Path, Any]) -> None:
    directory, reference = model
    (prompt,) = make_prompts([40])
    with torch.no_grad():
        want = reference(torch.tensor([prompt])).logits[0]

    in_floats, in_int8 = (
        logits_of(
            npu, load(npu, directory, quantises=q, dtype=torch.bfloat16), prompt, torch.bfloat16
        )
        for q in (False, True)
    )

    # There are about twenty products, and each adds an independent relative error of 0.01. bfloat16
    # and different choices of experts add errors of about the same size.
    assert relative_error(in_int8, want) < 0.12
    assert relative_error(in_floats, want) < relative_error(in_int8, want)


def test_graphs_give_the_tokens_of_eager_steps(npu: Any, model: tuple[Path, Any]) -> None:
    directory, _ = model

    eager = generate(npu, directory, W8A8)

    assert generate(npu, directory, W8A8, in_graphs=True) == eager


def test_a_checkpoint_in_int8_gives_the_tokens_of_one_quantised_while_loading(
    npu: Any, model: tuple[Path, Any], tmp_path: Path
) -> None:
    directory, _ = model

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        return int8_tensors(weight, name.removesuffix(".weight"))

    stored = rewrite(directory, tmp_path, quantise, {})

    assert generate(npu, stored, BFLOAT16) == generate(npu, directory, W8A8)


def test_fp8_with_block_scales_is_served_and_may_be_quantised(
    npu: Any, deepseek: Path, tmp_path: Path
) -> None:
    stored, back = tmp_path / "fp8", tmp_path / "floats"
    for folder in (stored, back):
        folder.mkdir()
    rewrite(deepseek, stored, fp8, {"quantization_config": FP8_CONFIG})
    checkpoint = Checkpoint(stored, torch.float32)
    rewrite(deepseek, back, lambda k, v: {k: checkpoint.read(k, tuple(v.shape))}, {})

    for settings in (BFLOAT16, W8A8):
        tokens = generate(npu, stored, settings, in_graphs=True)
        assert tokens == generate(npu, back, settings, in_graphs=True)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    is_ours = type(value).__module__.startswith(("dist_aclgraph.layers", "dist_aclgraph.models"))
    return tensors_of(list(vars(value).values())) if is_ours else []


def test_planned_sizes_count_exactly_the_quantised_elements(
    npu: Any, model: tuple[Path, Any]
) -> None:
    directory, _ = model
    spec = read_model_spec(directory)

    loaded = tensors_of(load(npu, directory, quantises=True, dtype=torch.bfloat16))

    one, two = (
        sum(
            part.bytes
            for part in weight_parts(spec, tp=1, ep=1, element_bytes=1, matrix_bytes=matrix_bytes)
        )
        for matrix_bytes in (1, 2)
    )
    assert sum(t.numel() for t in loaded if t.dtype == torch.int8) == two - one
