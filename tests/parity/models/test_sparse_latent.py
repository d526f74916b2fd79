"""Sparse latent attention: DeepSeek V3.2 and GLM-5 answer with the same tokens as transformers.

transformers runs one pass over the prompt and the answer. In this pass, each token of the answer
must be the most probable one at its position. The indexer chooses 24 keys, so most queries attend
only to some of their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.shapes.model_facts import read_model_facts
from tests.actors.rank_processes import ANSWER_S
from tests.checkpoints import (
    add_next_token_module,
    copy_of,
    logprobs,
    make_prompts,
    make_reference,
)
from tests.deployments import Answer, greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.test_against_transformers import (
    assert_a_strict_device_takes_every_call,
    assert_logprobs_near,
)
from tests.slow import slow

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
LENGTHS, NUM_TOKENS = (1, 3, 23, 24, 25, 64, 129, 300), 12
SHARED = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}


@dataclass(frozen=True)
class Model:
    """A checkpoint, the model of transformers from which it was saved, and prompts."""

    directory: Path
    model: Any
    prompts: list[list[int]]

    def best_tokens(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Return the token that transformers finds most probable at each position of an answer."""
        best: list[int] = logprobs(self.model, prompt, answer).argmax(-1).tolist()
        return best

    def is_greedy(self, answers: list[Answer]) -> bool:
        pairs = zip(self.prompts, answers, strict=True)
        return all(a.tokens == self.best_tokens(p, a.tokens) for p, a in pairs)


@pytest.fixture(scope="module")
def models(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Return a function that returns the model for an architecture and settings. The function makes
    each model only once.
    """
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
    """Return a configuration with few graphs, because piecewise graphs take long to capture."""
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
        (V32, 2, "FULL"),
        slow(V32, 2, "FULL_AND_PIECEWISE"),
        slow(GLM, 1, "FULL"),
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
@pytest.mark.parametrize("max_tokens", [slow(160), 48])
def test_prompts_in_several_steps_get_the_same_tokens(models: Any, max_tokens: int) -> None:
    model = models(V32)

    answers = answers_of(model, scheduler={"max_num_batched_tokens": max_tokens})

    assert model.is_greedy(answers)


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [(GLM, "FULL_DECODE_ONLY"), (V32, "FULL"), slow(V32, "FULL_AND_PIECEWISE")],
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

    assert num_cached >= len(prompts) * 288  # all prompts share 18 blocks of 16 tokens
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
    # All prompts fit into one step. So each later step has exactly the size of its graph, and needs
    # no padding.
    prompts = model.prompts[2:6]
    found = {}
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        with lockstep(config_of(model, graph={"mode": mode, "max_tokens": 4})) as group:
            answers = group.generate(prompts, greedy_params(NUM_TOKENS, logprobs=5))
        found[mode] = [[row.logprobs for row in answer.logprobs] for answer in answers]

    assert found["NONE"] == found["FULL_DECODE_ONLY"]


@pytest.mark.parametrize(
    ("architecture", "dtype", "mode", "drafts"),
    [
        (V32, "bfloat16", "FULL_AND_PIECEWISE", 1),
        slow(V32, "bfloat16", "FULL", 0),
        slow(GLM, "float16", "FULL", 1),
    ],
)
def test_a_strict_device_takes_every_call(
    models: Any, architecture: str, dtype: str, mode: str, drafts: int
) -> None:
    # index_topk is so large that the indexer chooses all keys. Otherwise, rounded scores could
    # choose other keys.
    model = models(architecture, index_topk=512)
    config = config_of(
        model,
        dtype=dtype,
        parallel={"tp": 2},
        speculative={"num_tokens": drafts},
        graph={"mode": mode},
        device={"emulator": {"strict": True}},
    )

    assert_a_strict_device_takes_every_call(model, config, NUM_TOKENS)


@pytest.mark.parametrize(
    ("architecture", "dtype", "mode"),
    [(V32, "bfloat16", "FULL"), slow(GLM, "float16", "FULL_AND_PIECEWISE")],
)
def test_latents_in_int8_change_probabilities_little(
    models: Any, architecture: str, dtype: str, mode: str
) -> None:
    """Prompts are computed in chunks and after cached prefixes, with drafts, on a strict device.

    Rounding to int8 changes a latent by at most half a scale, which is 1/254 of the largest of 128
    latents. The allowed difference of probabilities is three times the difference that bfloat16
    causes in transformers.
    """
    model = models(architecture, index_topk=512, **(SHARED if architecture == GLM else {}))
    config = config_of(
        model,
        dtype=dtype,
        kv={"block_size": 16, "num_blocks": 160, "dtype": "int8"},
        parallel={"tp": 2},
        speculative={"num_tokens": 1},
        scheduler={"max_num_batched_tokens": 160},
        graph={"mode": mode},
        device={"emulator": {"strict": True}},
    )

    with lockstep(config) as group:
        group.generate(model.prompts, greedy_params(NUM_TOKENS))
        first = group.generate(model.prompts, greedy_params(1, logprobs=20), "l")
        num_cached = group.scheduler.num_cached_tokens

    assert num_cached >= 288
    assert_logprobs_near(model, [answer.logprobs[0] for answer in first])


@pytest.mark.parametrize(
    ("architecture", "parallel", "drafts", "mode"),
    [
        slow(V32, {"tp": 2, "dp": 2, "ep": 4}, 2, "FULL_DECODE_ONLY"),
        slow(V32, {"tp": 2, "dp": 2, "ep": 4}, 1, "FULL"),
        slow(GLM, {"tp": 2, "dcp": 2, "ep": 2}, 1, "FULL_DECODE_ONLY"),
    ],
)
def test_repeated_steps_preemptions_and_cached_prefixes_change_no_token(
    models: Any, architecture: str, parallel: dict[str, int], drafts: int, mode: str
) -> None:
    model = models(architecture, **(SHARED if architecture == GLM else {}))
    tails = make_prompts((1, 9, 20, 33), seed=7)
    prompts = [model.prompts[-1][:192] + tail for tail in tails] * parallel.get("dp", 1)
    config = config_of(
        model,
        parallel={**parallel, "exchange": "all_to_all", "expert_capacity": 1.0},
        graph={"mode": mode, "max_tokens": 104},
        speculative={"num_tokens": drafts},
        scheduler={"max_num_batched_tokens": 100},
        # On each data-parallel rank, the requests share 12 blocks. Together, the requests need 15
        # other blocks at the end.
        kv={"block_size": 16, "num_blocks": 22 // parallel.get("dcp", 1)},
    )

    with lockstep(config) as group:
        group.generate([prompts[0]], greedy_params(1), "first")
        answers = group.generate(prompts, greedy_params(32))
        scheduler = group.scheduler

    assert scheduler.num_reruns
    assert scheduler.num_preemptions
    assert scheduler.num_cached_tokens >= len(prompts) * 192 // 2
    assert Model(model.directory, model.model, prompts).is_greedy(answers)


# Layouts whose ranks share contexts: tp, pcp, dcp, cp_interleave, number of drafts, graph mode.
LAYOUTS = [
    (V32, (1, 2, 1, 1), 1, "FULL_DECODE_ONLY"),
    (GLM, (2, 1, 2, 1), 1, "FULL_AND_PIECEWISE"),
    slow(V32, (2, 2, 4, 1), 0, "FULL_DECODE_ONLY"),
    slow(V32, (2, 2, 2, 16), 2, "FULL_AND_PIECEWISE"),
    slow(V32, (4, 1, 4, 4), 0, "NONE"),
    slow(V32, (4, 1, 2, 1), 1, "FULL_DECODE_ONLY"),
    slow(GLM, (2, 2, 1, 1), 0, "PIECEWISE"),
    slow(GLM, (1, 2, 2, 8), 1, "FULL_DECODE_ONLY"),
    slow(GLM, (1, 4, 4, 1), 0, "FULL_AND_PIECEWISE"),
]


def parallel_of(sizes: tuple[int, int, int, int]) -> dict[str, int]:
    return dict(zip(("tp", "pcp", "dcp", "cp_interleave"), sizes, strict=True))


@pytest.mark.parametrize(("architecture", "sizes", "drafts", "mode"), LAYOUTS)
def test_ranks_that_share_contexts_give_the_same_tokens(
    models: Any, architecture: str, sizes: Any, drafts: int, mode: str
) -> None:
    # GLM has layers without an indexer, which use the keys that an earlier layer has chosen.
    model = models(architecture, **(SHARED if architecture == GLM else {}))
    config = config_of(
        model,
        parallel=parallel_of(sizes),
        graph={"mode": mode},
        speculative={"num_tokens": drafts},
        scheduler={"max_num_batched_tokens": 150},  # so that prompts are cut at different positions
    )

    with lockstep(config) as group:
        answers = group.generate(model.prompts, greedy_params(NUM_TOKENS))
        buckets = group.report()["buckets"]

    assert any(bucket["replays"] for bucket in buckets) == (mode != "NONE")
    assert model.is_greedy(answers)


@pytest.mark.parametrize("sizes", [slow((1, 2, 1, 1)), slow((2, 1, 2, 1)), slow((2, 2, 4, 1))])
def test_shared_contexts_have_cached_prefixes(models: Any, sizes: Any) -> None:
    model = models(V32)
    config = config_of(model, parallel=parallel_of(sizes))
    tail = make_prompts((20,), seed=7)[0]
    prompts = [model.prompts[-1] + tail[:n] for n in (0, 1, 20)]

    with lockstep(config) as group:
        group.generate([model.prompts[-1]], greedy_params(1), "first")
        answers = group.generate(prompts, greedy_params(NUM_TOKENS))
        num_cached = group.scheduler.num_cached_tokens
        (num_bytes,) = set(group.ranks.call("kv_bytes", "SERVING", ANSWER_S))

    spec = KVCacheSpec.from_config(config, read_model_facts(model.directory))
    assert num_bytes == spec.total_bytes(80)
    assert num_cached >= len(prompts) * 256  # the blocks that all prompts share
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.best_tokens(prompt, answer.tokens)


@pytest.mark.slow
def test_preempted_requests_with_shards_give_the_same_tokens(models: Any) -> None:
    model = models(V32)
    # 15 usable blocks, each of 32 tokens over both ranks. The longest request needs ten of them.
    config = config_of(model, parallel={"tp": 2, "dcp": 2}, kv={"block_size": 16, "num_blocks": 16})

    with lockstep(config) as group:
        answers = group.generate(model.prompts, greedy_params(NUM_TOKENS))
        num_preempted = group.scheduler.num_preemptions

    assert num_preempted
    assert model.is_greedy(answers)


@pytest.mark.parametrize("sizes", [slow((2, 1, 2, 1)), slow((1, 2, 2, 1))])
def test_a_strict_device_takes_every_call_with_shards(models: Any, sizes: Any) -> None:
    model = models(V32, index_topk=512)
    config = config_of(
        model,
        dtype="bfloat16",
        parallel=parallel_of(sizes),
        speculative={"num_tokens": 1},
        device={"emulator": {"strict": True}},
    )

    assert_a_strict_device_takes_every_call(model, config, NUM_TOKENS)
