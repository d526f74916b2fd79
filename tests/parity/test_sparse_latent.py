"""Sparse latent attention: DeepSeek V3.2 and GLM-5 answer with the tokens of transformers.

transformers runs one pass over prompt and answer; each token of the answer must be the most
probable token of this pass. The indexer chooses 24 keys, so most queries attend to only some of
their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from tests.checkpoints import (
    add_next_token_module,
    copy_of,
    logprobs,
    make_prompts,
    make_reference,
)
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.test_against_transformers import assert_logprobs_near
from tests.slow import slow

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
LENGTHS, NUM_TOKENS = (1, 3, 23, 24, 25, 64, 129, 300), 12
SHARED = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}


@dataclass(frozen=True)
class Model:
    """A checkpoint, the model of transformers that was saved in it, and prompts."""

    directory: Path
    model: Any
    prompts: list[list[int]]

    def best_tokens(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Return the most probable token at each position of an answer."""
        best: list[int] = logprobs(self.model, prompt, answer).argmax(-1).tolist()
        return best

    def is_greedy(self, answers: list[Answer]) -> bool:
        pairs = zip(self.prompts, answers, strict=True)
        return all(a.tokens == self.best_tokens(p, a.tokens) for p, a in pairs)


@pytest.fixture(scope="module")
def models(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Return a function that makes a model for an architecture and settings, only once."""
    known: dict[str, Model] = {}

    def model(architecture: str, **settings: Any) -> Model:
        key = f"{architecture} {settings}"
        if key not in known:
            directory = tmp_path_factory.mktemp(architecture)
            made = make_reference(architecture, directory, **settings)
            add_next_token_module(directory)
            known[key] = Model(directory, made, make_prompts(LENGTHS))
        return known[key]

    return model


def config_of(model: Model, **options: Any) -> Config:
    """Return a deployment with few graphs, because capturing graphs of pieces takes long."""
    graph = {"max_tokens": 40, **options.pop("graph", {})}
    kv = {"block_size": 16, "num_blocks": 80}
    return make_deployment_config(model.directory, **{"kv": kv, "graph": graph, **options})


def answers_of(model: Model, **options: Any) -> list[Answer]:
    with lockstep(config_of(model, **options)) as group:
        return group.generate(model.prompts, greedy_params(NUM_TOKENS))


@pytest.mark.parametrize(
    ("architecture", "tp", "mode"),
    [
        (V32, 1, "FULL_DECODE_ONLY"),
        (GLM, 2, "FULL_AND_PIECEWISE"),
        slow(V32, 2, "FULL_AND_PIECEWISE"),
        slow(GLM, 1, "FULL_DECODE_ONLY"),
        slow(V32, 4, "NONE"),
        slow(GLM, 1, "PIECEWISE"),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(
    models: Any, architecture: str, tp: int, mode: str
) -> None:
    model = models(architecture)

    answers = answers_of(model, parallel={"tp": tp}, graph={"mode": mode})

    assert model.is_greedy(answers)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [160, 48])
def test_prompts_in_several_steps_get_the_same_tokens(models: Any, max_tokens: int) -> None:
    model = models(V32)

    answers = answers_of(model, scheduler={"max_num_batched_tokens": max_tokens})

    assert model.is_greedy(answers)


@pytest.mark.parametrize(
    ("architecture", "mode"), [(GLM, "FULL_DECODE_ONLY"), slow(V32, "FULL_AND_PIECEWISE")]
)
@pytest.mark.parametrize("in_flight", [slow(1), 2])
def test_drafts_change_no_token(models: Any, architecture: str, mode: str, in_flight: int) -> None:
    model = models(architecture)

    answers = answers_of(
        model,
        graph={"mode": mode},
        speculative={"num_tokens": 2},
        scheduler={"steps_in_flight": in_flight},
    )

    assert model.is_greedy(answers)


def test_a_cached_prefix_has_its_index_keys(models: Any) -> None:
    model = models(V32)
    config = config_of(model, kv={"block_size": 16, "num_blocks": 160})
    tail = make_prompts((20,), seed=7)[0]
    prompts = [model.prompts[-1] + tail[:n] for n in (0, 1, 20)]

    with lockstep(config) as group:
        group.generate([model.prompts[-1]], greedy_params(1), "first")
        answers = group.generate(prompts, greedy_params(NUM_TOKENS))
        num_cached = group.scheduler.num_cached_tokens

    assert num_cached >= len(prompts) * 288  # the 18 blocks that all prompts share
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.best_tokens(prompt, answer.tokens)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", slow("NONE")])
def test_layers_without_an_indexer_use_an_earlier_choice(models: Any, mode: str) -> None:
    model = models(GLM, **SHARED)

    answers = answers_of(
        model,
        parallel={"tp": 2},
        graph={"mode": mode},
        speculative={"num_tokens": 1},
        scheduler={"max_num_batched_tokens": 160},
    )

    assert model.is_greedy(answers)


@pytest.mark.parametrize(
    "changes",
    [
        {"indexer_rope_interleave": True},  # as in GLM-5
        slow({"index_topk": 25}),
    ],
)
def test_another_choice_gives_other_tokens(
    models: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = models(V32)
    changed = Model(copy_of(model.directory, tmp_path, **changes), model.model, model.prompts)

    assert not changed.is_greedy(answers_of(changed, graph={"mode": "NONE"}))


@pytest.mark.slow
def test_a_choice_of_all_keys_is_latent_attention(models: Any, tmp_path: Path) -> None:
    model = models(V32)
    longest = max(LENGTHS) + NUM_TOKENS
    sparse = copy_of(model.directory, tmp_path / "sparse", index_topk=longest)
    dense = copy_of(
        model.directory,
        tmp_path / "dense",
        architectures=["DeepseekV3ForCausalLM"],
        index_head_dim=None,
    )

    tokens = [
        [answer.tokens for answer in answers_of(Model(each, model.model, model.prompts))]
        for each in (sparse, dense)
    ]

    assert tokens[0] == tokens[1]


def test_replayed_steps_equal_eager_steps_bit_by_bit(models: Any) -> None:
    model = models(V32)
    # All prompts fit into one step, so each later step has as many tokens as the graph.
    prompts = model.prompts[2:6]
    found = {}
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        with lockstep(config_of(model, graph={"mode": mode, "max_tokens": 4})) as group:
            answers = group.generate(prompts, greedy_params(NUM_TOKENS, logprobs=5))
        found[mode] = [[row.logprobs for row in answer.logprobs] for answer in answers]

    assert found["NONE"] == found["FULL_DECODE_ONLY"]


@pytest.mark.parametrize(("architecture", "dtype"), [(V32, "bfloat16"), slow(GLM, "float16")])
def test_a_strict_device_takes_every_call(models: Any, architecture: str, dtype: str) -> None:
    # index_topk is so large that the indexer chooses all keys; rounded scores would choose others.
    model = models(architecture, index_topk=512)
    config = config_of(
        model,
        dtype=dtype,
        parallel={"tp": 2},
        speculative={"num_tokens": 1},
        graph={"mode": "FULL_AND_PIECEWISE"},
        device={"emulator": {"strict": True}},
    )

    with lockstep(config) as group:
        group.generate(model.prompts, greedy_params(NUM_TOKENS))
        first = group.generate(model.prompts, greedy_params(1, logprobs=20), "l")

    assert_logprobs_near(model, [answer.logprobs[0] for answer in first])


@pytest.mark.parametrize("parallel", [{"tp": 2, "dcp": 2}, {"tp": 1, "pcp": 2}])
def test_shared_contexts_are_refused(models: Any, parallel: dict[str, int]) -> None:
    config = make_deployment_config(models(V32).directory, parallel=parallel)

    refusal = pytest.raises(ConfigError, match="whose keys an indexer chooses cannot be shared")
    with refusal, lockstep(config):
        pass
