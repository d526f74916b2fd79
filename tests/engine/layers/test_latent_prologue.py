"""Models in which one operator computes the queries of latent attention and writes the cache are
compared with models that use separate operators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.common.one_rank import LaunchCount
from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.config import make_config
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import make_reference
from tests.engine.prompt_steps import prompt_step
from tests.engine.runners import MAX_LEN, make_runner
from tests.engine.weights.test_w8a8_models import W8A8, generate, relative_error
from tests.plans import decode_graph

LAYERS = 2
SIZES = {
    "hidden_size": 6144,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
}
LENGTHS = [6, 5]  # numbers of tokens of two direct requests
TOKENS = torch.arange(5, 16)
BLOCK_SIZE = 16
SETTINGS = {**W8A8, "kv": {"block_size": BLOCK_SIZE}}
SEPARATE = ["norm_quant", "swiglu_quant", "nz_weights"]
FUSED = [*SEPARATE, "latent_prologue"]
# Number of launches that the operator saves. It replaces two products, a norm, the quantisation of
# the norm's result, three copies of parts of results, the rotation, the write of the cache, and the
# product with the key matrices.
SAVED = 9


@pytest.fixture(scope="module", params=[True, False], ids=["interleaved", "halves"])
def model(npu: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("wide")
    keys = {**SIZES, "rope_interleave": request.param}
    return directory, make_reference("DeepseekV3ForCausalLM", directory, **keys)


@pytest.fixture
def checkpoint(model: tuple[Path, Any]) -> Path:
    return model[0]


def decide(npu: Any, chosen: list[str], **keys: Any) -> Fusions:
    settings = {"model": "m", "device": {"fusions": chosen}, "kv": {"block_size": BLOCK_SIZE}}
    return Fusions.decide(
        make_config({**settings, **keys}), Chip(npu.name, npu.cann), installed_name()
    )


def logits_of(npu: Any, directory: Path, fusions: Fusions) -> tuple[Tensor, list[Tensor]]:
    """Run a step of two requests with few tokens; return their logits, and the caches after the
    step.
    """
    spec = read_model_spec(directory)
    weights = Checkpoint(directory, torch.bfloat16, quantises=True, names=spec.names)
    model = Decoder(spec, ONE_RANK, weights, device=npu.device, max_len=MAX_LEN, fusions=fusions)
    caches = model.make_caches(CacheRoom(4, BLOCK_SIZE, torch.bfloat16))
    steps = AttentionSteps(model.kind, ContextPlace(Shards(BLOCK_SIZE)), npu)
    first, second = LENGTHS
    slots = torch.tensor([*range(16, 16 + first), *range(32, 32 + second)], dtype=torch.int32)
    table = np.array([[1], [2]], np.int32)
    host, device = prompt_step(npu, [first, first + second], LENGTHS, table, slots)
    metadata = steps.of_step(host, device)
    assert metadata.attends_directly
    tokens = TOKENS.int().to(npu.device)
    with torch.inference_mode():
        hidden = model.forward(tokens, device.positions, device.slots, caches, metadata)
        logits = model.logits(hidden).cpu().float()
    return logits, [x.cpu().float() for cache in caches for x in cache.tensors]


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    return (got - want).norm(dim=1) / want.norm(dim=1)


def test_one_operator_computes_what_separate_operators_compute(
    npu: Any, model: tuple[Path, Any]
) -> None:
    directory, reference = model
    fused, separate = decide(npu, FUSED), decide(npu, SEPARATE)
    with torch.no_grad():
        wanted = [reference(prompt.unsqueeze(0)).logits[0] for prompt in TOKENS.split(LENGTHS)]

    logits, caches = logits_of(npu, directory, fused)
    twin, caches_of_twin = logits_of(npu, directory, separate)

    assert fused.report()["latent_prologue"] == f"in {LAYERS} places"
    assert separate.report()["latent_prologue"] == "off (not in device.fusions)"
    # The operator quantises float32 values; separate operators first round them to bfloat16. So the
    # two models round to different int8 values. This adds an error as large as the rounding error
    # of int8 itself.
    assert 0 < relative_error(logits, twin) < 0.12
    # In some rows, the two models may choose different keys, so these rows differ more. So the test
    # compares the median.
    assert row_errors(logits, torch.cat(wanted)).median() < 0.12
    for got, want in zip(caches, caches_of_twin, strict=True):
        assert (got != 0).any() and relative_error(got, want) < 0.05


def test_graphs_give_the_tokens_of_eager_steps(npu: Any, checkpoint: Path) -> None:
    eager, in_graphs = (
        generate(npu, checkpoint, SETTINGS, in_graphs=captures, fusions=decide(npu, FUSED))
        for captures in (False, True)
    )

    assert in_graphs == eager


def test_the_operator_saves_launches_in_each_layer(npu: Any, checkpoint: Path) -> None:
    counts, graph = [], decode_graph(4)
    for chosen in (SEPARATE, FUSED):
        fusions = decide(npu, chosen)
        runner = make_runner(npu, checkpoint, 4, [graph], settings=SETTINGS, fusions=fusions)
        runner.warm_up(graph)
        with LaunchCount() as launches:
            runner.capture(graph)
        counts.append(launches.count)
        runner.close()

    assert counts[0] - counts[1] == SAVED * LAYERS
