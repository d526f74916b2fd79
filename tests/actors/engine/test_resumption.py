"""After a fault of a device or a link, a group resumes with its KV and its graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.sampling import SamplingParams
from tests.actors.serving_ranks import ServingRanks, serving_ranks
from tests.checkpoints import add_next_token_module, copy_of, make_prompts, make_reference
from tests.deployments import Answer, greedy_params, make_deployment_config, tokens_of
from tests.slow import rare, slow

STREAMS, TOKENS, ANSWER_S = 16, 40, 120.0
UNCHANGED = ("prompt_tokens", "prefix_cache_queries", "num_preemptions", "generation_tokens")
# Number of a call of the operator. This call comes after the start, while the requests run.
MIDDLE = 300


def make_config(
    checkpoint: Path, *faults: dict[str, Any], queues: bool = False, **overrides: Any
) -> Config:
    """Return a configuration with planted faults; with ``queues``, torch_npu's task queue is on."""
    names = ("fault", "second_fault")
    emulated = {"strict": False, **dict(zip(names, faults, strict=False))}
    sections = {
        "parallel": {"tp": 2},
        "device": {"emulator": emulated, "task_queue": int(queues)},
        "scheduler": {"max_num_seqs": STREAMS},
        "kv": {"num_blocks": 128},
        "recovery": {"resume_s": 20.0},
        **overrides,
    }
    return make_deployment_config(checkpoint, **sections)


def submit_all(service: ServingRanks, prefix: str = "r", length: int = 20) -> list[Answer]:
    """Submit greedy requests, requests with penalties, and requests with a seed and logprobs."""
    params = [
        greedy_params(TOKENS),
        greedy_params(TOKENS, repetition_penalty=1.3),
        SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=7, logprobs=2, ignore_eos=True),
        greedy_params(TOKENS),
    ]
    prompts = make_prompts([length] * STREAMS)
    return [
        service.submit(f"{prefix}{i}", prompt, params[i % len(params)])
        for i, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Sound:
    """The results of a run without a fault. Tests compare the results of other runs with these."""

    checkpoint: Path
    drafts: int
    tokens: list[list[int]]
    metrics: dict[str, Any]


@pytest.fixture(scope="module", params=[0, slow(1)])
def sound(
    request: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sound]:
    drafts = request.param
    if drafts:
        checkpoint = copy_of(checkpoint, tmp_path_factory.mktemp("drafts"))
        add_next_token_module(checkpoint)
    config = make_config(checkpoint, speculative={"num_tokens": drafts})
    with serving_ranks(config, tmp_path_factory.mktemp("sound")) as service:
        tokens = tokens_of(ANSWER_S, submit_all(service))
        yield Sound(checkpoint, drafts, tokens, service.loop.metrics())


@pytest.mark.parametrize(
    ("op", "kind"),
    [("HcclAllReduce", "link"), slow("HcclAllReduce", "fail"), ("aclnnSwiGlu", "fail")],
)
def test_no_request_begins_again_and_no_graph_is_captured_again(
    sound: Sound, tmp_path: Path, op: str, kind: str
) -> None:
    call = MIDDLE if op == "HcclAllReduce" else MIDDLE // 3
    fault = {"op": op, "call": call, "rank": 1, "kind": kind}
    config = make_config(sound.checkpoint, fault, speculative={"num_tokens": sound.drafts})

    with serving_ranks(config, tmp_path) as service:
        assert tokens_of(ANSWER_S, submit_all(service)) == sound.tokens
        metrics = service.loop.metrics()
        assert list(metrics["resumptions"].values()) == [1], service.loop.failure_now()
        assert {name: metrics[name] for name in UNCHANGED} == {
            name: sound.metrics[name] for name in UNCHANGED
        }
        assert metrics["graph"]["replays"], "graphs are not replayed any more"
        assert tokens_of(ANSWER_S, submit_all(service, "later")) == sound.tokens


@pytest.mark.slow
def test_a_group_comes_back_with_one_step_in_flight(sound: Sound, tmp_path: Path) -> None:
    one = {"max_num_seqs": STREAMS, "steps_in_flight": 1}
    fault = {"op": "HcclAllReduce", "call": MIDDLE, "rank": 0, "kind": "link"}
    config = make_config(
        sound.checkpoint, fault, speculative={"num_tokens": sound.drafts}, scheduler=one
    )

    with serving_ranks(config, tmp_path) as service:
        assert tokens_of(ANSWER_S, submit_all(service)) == sound.tokens
        assert service.loop.metrics()["resumptions"] == {"link": 1}


# The first calls of the operator compute prompts, and later calls decode.
@pytest.mark.parametrize("call", [rare(20), slow(31), rare(41), 100])
def test_a_group_without_graphs_comes_back(sound: Sound, tmp_path: Path, call: int) -> None:
    fault = {"op": "aclnnSwiGlu", "call": call, "rank": 1, "kind": "fail"}
    speculative = {"num_tokens": sound.drafts}
    config = make_config(sound.checkpoint, fault, speculative=speculative, graph={"mode": "NONE"})

    with serving_ranks(config, tmp_path) as service:
        assert tokens_of(ANSWER_S, submit_all(service)) == sound.tokens
        assert service.loop.metrics()["resumptions"] == {"operator": 1}


def test_a_group_comes_back_whose_operators_pass_through_a_queue(
    sound: Sound, tmp_path: Path
) -> None:
    fault = {"op": "aclnnSwiGlu", "call": MIDDLE // 3, "rank": 1, "kind": "fail"}
    config = make_config(
        sound.checkpoint, fault, speculative={"num_tokens": sound.drafts}, queues=True
    )

    with serving_ranks(config, tmp_path) as service:
        assert tokens_of(ANSWER_S, submit_all(service)) == sound.tokens
        assert service.loop.metrics()["resumptions"] == {"operator": 1}


@pytest.mark.parametrize(
    ("drafts", "op", "kind", "call"),
    [
        slow(0, "HcclAllReduce", "link", MIDDLE),
        rare(1, "HcclAllReduce", "link", MIDDLE),
        slow(1, "aclnnSwiGlu", "fail", MIDDLE // 3),
    ],
)
def test_requests_of_a_hybrid_start_again_from_their_checkpoints(
    npu: Any, tmp_path: Path, drafts: int, op: str, kind: str, call: int
) -> None:
    """A recurrent state cannot be recomputed in place, so the requests lose their rows and start
    again.

    The requests still get the same tokens.
    """
    checkpoint = tmp_path / "hybrid"
    make_reference("Qwen3NextForCausalLM", checkpoint)
    add_next_token_module(checkpoint)
    fault = {"op": op, "call": call, "rank": 1, "kind": kind}
    found, metrics = [], []
    for faults in ([], [fault]):
        config = make_config(
            checkpoint,
            *faults,
            kv={"num_blocks": 128, "block_size": 32},
            speculative={"num_tokens": drafts},
        )
        (tmp_path / str(len(faults))).mkdir()
        with serving_ranks(config, tmp_path / str(len(faults))) as service:
            found += [tokens_of(ANSWER_S, submit_all(service, name, 40)) for name in ("r", "later")]
            metrics.append(service.loop.metrics())

    sound, struck = metrics
    assert all(tokens == found[0] for tokens in found[1:])
    assert sum(struck["resumptions"].values()) == 1
    assert struck["generation_tokens"] == sound["generation_tokens"]
    assert struck["num_preemptions"] > sound["num_preemptions"]


# The faulty memory contains a layer's keys, in a block that holds a request's first tokens.
BAD_KV = {
    "op": "aclnnFusedInferAttentionScoreV3",
    "call": MIDDLE // 3,
    "kind": "uce",
    "rank": 1,
    "operand": 1,
    "offset": 1 << 16,
}


def test_kv_in_memory_that_turns_bad_is_computed_again(sound: Sound, tmp_path: Path) -> None:
    config = make_config(sound.checkpoint, BAD_KV, speculative={"num_tokens": sound.drafts})

    with serving_ranks(config, tmp_path) as service:
        assert tokens_of(ANSWER_S, submit_all(service)) == sound.tokens
        metrics = service.loop.metrics()
        assert metrics["resumptions"] == {"uce_kv": 1}, service.loop.failure_now()
        assert metrics["num_preemptions"] == sound.metrics["num_preemptions"] + STREAMS
        assert metrics["generation_tokens"] == sound.metrics["generation_tokens"]
        assert tokens_of(ANSWER_S, submit_all(service, "later")) == sound.tokens


@pytest.mark.slow
def test_states_in_memory_that_turns_bad_are_computed_again(npu: Any, tmp_path: Path) -> None:
    """The checkpoints of states in this memory are lost, so no later request starts from these
    checkpoints.
    """
    checkpoint, arms = tmp_path / "hybrid", tmp_path / "arms"
    make_reference("Qwen3NextForCausalLM", checkpoint)
    add_next_token_module(checkpoint)
    config = make_config(
        checkpoint,
        {"file": str(arms)},
        kv={"num_blocks": 128, "block_size": 32},
        speculative={"num_tokens": 1},
    )

    with serving_ranks(config, tmp_path) as service:
        sound = tokens_of(ANSWER_S, submit_all(service, "sound", 40))
        preempted = service.loop.metrics()["num_preemptions"]
        # In the first step, a layer copies checkpoints to the requests' rows, and then writes the
        # states that follow from the prompts' last tokens.
        draft = arms.with_suffix(".draft")
        draft.write_text(
            "fault_op=aclnnScatterNdUpdate fault_kind=uce fault_rank=1 fault_offset=8192"
        )
        draft.rename(arms)
        assert tokens_of(ANSWER_S, submit_all(service, "struck", 40)) == sound
        metrics = service.loop.metrics()
        assert metrics["resumptions"] == {"uce_kv": 1}, service.loop.failure_now()
        assert metrics["num_preemptions"] > preempted
        assert not arms.exists()
        assert tokens_of(ANSWER_S, submit_all(service, "later", 40)) == sound


LINK = {"op": "HcclAllReduce", "call": MIDDLE, "rank": 1, "kind": "link"}
STOPS, RESUMES = "aclrtDeviceTaskAbort", "HcclCommResume"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        slow([{**LINK, "kind": "ecc"}], "rank 1 in SERVING: .*HBM MULTI BIT ECC ERROR"),
        # First, HCCL's memory is faulty. Then the memory of a weight is faulty.
        slow([{**LINK, "kind": "uce"}], "rank 1 in SERVING: .*UCE ERROR"),
        ([{**BAD_KV, "op": "aclnnMm", "offset": 0}], "rank 1 in SERVING: .*UCE ERROR"),
        # The operator fails in a step, and fails again in the repeated step.
        (
            [{**LINK, "kind": "fail"}, {**LINK, "call": MIDDLE + 1, "kind": "fail"}],
            "rank 1 in SERVING: step .*507015",
        ),
        slow(
            [LINK, {"op": RESUMES, "rank": 0, "kind": "fail"}], "rank 0 in SERVING: it did not come"
        ),
        ([LINK, {"op": RESUMES, "rank": 0, "kind": "die"}], "rank 0 in SERVING: .*(died|ended)"),
        ([LINK, {"op": STOPS, "rank": 0, "kind": "fail"}], "rank 0 in SERVING: it did not come"),
        slow(
            [LINK, {"op": STOPS, "rank": 0, "kind": "stall", "stall_s": 600.0}], "rank 0 in SERVING"
        ),
        slow([LINK, {"op": STOPS, "rank": 1, "kind": "die"}], "rank 1 in SERVING"),
    ],
)
def test_a_group_that_cannot_resume_is_lost_within_the_limit(
    checkpoint: Path, tmp_path: Path, faults: list[dict[str, Any]], reason: str
) -> None:
    config = make_config(checkpoint, *faults, recovery={"resume_s": 5.0})

    with serving_ranks(config, tmp_path) as service:
        answers = submit_all(service)

        for answer in answers:
            assert answer.ended.wait(ANSWER_S)
            assert re.search(reason, answer.error), answer.error
        assert re.search(reason, service.loop.failure_now())
