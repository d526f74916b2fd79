"""Latents in int8 without an indexer. DeepSeek V3 and GLM-4.7-Flash give the same probabilities as
transformers, if transformers rounds its latents to the values that int8 latents can have.

The model of transformers rounds the normalised latents of each layer: 128 values share a scale,
which is 1/127 of the largest of them. Both models compute in float32, but add in different orders.
So if a latent is near the middle between two int8 values, the two models may round it to different
values. The layers have no experts, because another choice of experts would change the results more
than rounding changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_aclgraph.config import Config
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.planning.planner import Planner
from tests.checkpoints import add_next_token_module, logprobs, make_prompts, make_reference
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import Reference
from tests.parity.test_against_transformers import assert_a_strict_device_takes_every_call
from tests.slow import slow

DEEPSEEK, GLM = "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
KIMI = "KimiLinearForCausalLM"  # most layers have linear attention, the others have latents
LENGTHS, NUM_TOKENS, TILE = (1, 3, 15, 16, 17, 64, 129, 300), 12, 128
DENSE = {"first_k_dense_replace": 4}  # neither the layers nor the next-token module have experts
# Measured differences of log-probabilities are up to 0.003. If transformers does not round its
# latents, the differences are 0.02 to 0.3.
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def models(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    found = {}
    for architecture in (DEEPSEEK, GLM, KIMI):
        directory, has_drafts = tmp_path_factory.mktemp(architecture), architecture != KIMI
        model = make_reference(architecture, directory, **DENSE if has_drafts else {})
        if has_drafts:
            add_next_token_module(directory)
        found[architecture] = Reference(directory, model, make_prompts(LENGTHS), [])
    return found


def rounded(latents: Tensor) -> Tensor:
    """Return latents with the values that the service stores in int8."""
    tiles = latents.unflatten(-1, (-1, TILE))
    scales = tiles.abs().amax(-1, keepdim=True) / 127
    return ((tiles / scales).round() * scales).flatten(-2)


@contextmanager
def rounded_latents(model: Any) -> Iterator[None]:
    """Within this context, the attention of ``model`` (of transformers) uses rounded latents."""
    norms = [layer.self_attn.kv_a_layernorm for layer in model.model.layers]
    hooks = [norm.register_forward_hook(lambda *call: rounded(call[-1])) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def assert_rounded(model: Reference, answers: list[Answer]) -> None:
    """Assert that, with rounded latents, transformers finds each token most probable, and gives the
    same log-probabilities.
    """
    with rounded_latents(model.model):
        for prompt, answer in zip(model.prompts, answers, strict=True):
            expected = logprobs(model.model, prompt, answer.tokens)
            found = torch.tensor([row.logprobs[0] for row in answer.logprobs])
            chosen = expected.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(found, chosen, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(found, expected.amax(-1), rtol=0, atol=TOLERANCE)


def config_of(model: Reference, **options: Any) -> Config:
    """Return a configuration with few graphs, because piecewise graphs take long to capture."""
    graph = {"max_tokens": 40, **options.pop("graph", {})}
    kv = {"block_size": 16, "num_blocks": 160, "dtype": "int8"}
    return make_deployment_config(model.directory, **{"kv": kv, "graph": graph, **options})


@pytest.mark.parametrize(
    ("architecture", "parallel", "mode", "drafts"),
    [
        (DEEPSEEK, {"tp": 2}, "FULL_DECODE_ONLY", 0),
        (GLM, {"tp": 1}, "FULL_AND_PIECEWISE", 1),
        slow(DEEPSEEK, {"tp": 2}, "NONE", 2),
        slow(DEEPSEEK, {"tp": 1, "pcp": 2}, "PIECEWISE", 1),
        slow(DEEPSEEK, {"tp": 4}, "FULL", 2),
    ],
)
def test_probabilities_are_those_of_rounded_latents(
    models: dict[str, Reference],
    architecture: str,
    parallel: dict[str, int],
    mode: str,
    drafts: int,
) -> None:
    """Prompts are computed in chunks. A second computation of the prompts uses cached prefixes."""
    model = models[architecture]
    config = config_of(
        model,
        parallel=parallel,
        graph={"mode": mode},
        speculative={"num_tokens": drafts},
        scheduler={"max_num_batched_tokens": 160},
    )

    with lockstep(config) as group:
        answers = group.generate(model.prompts, greedy_params(NUM_TOKENS, logprobs=1))
        again = group.generate(model.prompts, greedy_params(NUM_TOKENS, logprobs=1), "again")
        num_cached = group.scheduler.num_cached_tokens

    assert num_cached >= 288
    assert_rounded(model, answers)
    assert_rounded(model, again)


def test_replayed_steps_equal_eager_steps_bit_by_bit(models: dict[str, Reference]) -> None:
    model = models[DEEPSEEK]
    # All prompts fit into one step. So each later step has exactly the size of its graph, and needs
    # no padding.
    prompts, found = model.prompts[2:6], {}
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        with lockstep(config_of(model, graph={"mode": mode, "max_tokens": 4})) as group:
            answers = group.generate(prompts, greedy_params(NUM_TOKENS, logprobs=5))
        found[mode] = [[row.logprobs for row in answer.logprobs] for answer in answers]

    assert found["NONE"] == found["FULL_DECODE_ONLY"]


@pytest.mark.parametrize("architecture", [DEEPSEEK, slow(KIMI)])
def test_latents_in_int8_change_probabilities_little(
    models: dict[str, Reference], architecture: str
) -> None:
    """A strict device accepts every call, in bfloat16 and with drafts.

    Rounding to int8 changes a latent by at most half a scale, which is 1/254 of the largest of 128
    latents. The allowed difference of probabilities is three times the difference that bfloat16
    causes in transformers.
    """
    model = models[architecture]
    config = config_of(
        model,
        dtype="bfloat16",
        parallel={"tp": 2},
        speculative={"num_tokens": int(architecture != KIMI)},
        scheduler={"max_num_batched_tokens": 160},
        device={"emulator": {"strict": True}},
    )

    assert_a_strict_device_takes_every_call(model, config, NUM_TOKENS)


def test_a_plan_counts_the_bytes_of_int8_latents(models: dict[str, Reference]) -> None:
    config = config_of(models[DEEPSEEK], dtype="bfloat16")
    planner = Planner.from_config(config)

    layers = planner.facts.num_layers
    assert KVCacheSpec.from_config(config, planner.facts).bytes_per_block == layers * 16 * 656
    assert planner.config.graph.mode == config.graph.mode
