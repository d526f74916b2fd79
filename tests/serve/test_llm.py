from __future__ import annotations

import pytest

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment.llm import LLM
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import (
    DeviceError,
    EngineUnavailableError,
    InvalidParameterError,
    RequestTooLongError,
)
from dist_aclgraph.sampling import SamplingParams
from tests.serve.conftest import CONFIG, until
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine


class FakeDeployment:
    """A deployment of one fake engine in this process."""

    node_id = NODE
    token = TOKEN

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.is_running = True

    def reach(self) -> Reach:
        return Reach([self.engine.address], self.token, 2048, self.node_id)

    def report(self) -> dict[str, object]:
        return {"plan_version": 1}

    def raise_if_dead(self) -> None:
        pass

    def outlook(self) -> Outlook:
        return Outlook(progress="PLACING")

    def shut_down(self) -> None:
        if self.is_running:
            self.engine.close()
        self.is_running = False


@pytest.fixture
def deployment():
    deployment = FakeDeployment()
    yield deployment
    deployment.shut_down()


@pytest.fixture
def llm(deployment):
    with LLM(load_config(CONFIG), start=lambda config: deployment) as llm:
        yield llm


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", [70, 71], "two three"]

    found = llm.generate(prompts, SamplingParams(max_tokens=2))

    assert [c.finish_reason for c in found] == ["length"] * 3
    assert found[1].token_ids == found[1].prompt_token_ids == [70, 71]
    assert found[1].text == llm.tokenizer.decode([70, 71])


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm, deployment):
    ids = llm.tokenizer.encode("one STOP two") * 20
    deployment.engine.reply = lambda submit: ids

    (found,) = llm.generate(["x"], SamplingParams(max_tokens=500, stop=("TOP",)))

    assert (found.text, found.finish_reason) == ("one S", "stop")
    until(lambda: deployment.engine.num_running == 0)


def test_without_max_tokens_the_context_is_the_limit(llm, deployment):
    deployment.engine.reply = lambda submit: [70, llm.tokenizer.eos_ids[0]]

    (found,) = llm.generate([[5] * 2000], SamplingParams(max_tokens=None))

    assert deployment.engine.submitted[0].max_tokens == 48
    assert (found.text, found.finish_reason) == (llm.tokenizer.decode([70]), "stop")


def test_equal_seeds_are_kept_and_missing_ones_drawn(llm, deployment):
    params = [SamplingParams(max_tokens=1, seed=3), SamplingParams(max_tokens=1)]

    llm.generate([[5], [5]], params)

    first, second = (submit.sampling.seed for submit in deployment.engine.submitted)
    assert first == 3
    assert second != 0


def test_logprobs_are_one_per_token(llm):
    (found,) = llm.generate([[70, 71]], SamplingParams(max_tokens=2, logprobs=1))

    assert [row.rank for row in found.logprobs] == [1, 1]


def test_a_failed_request_raises_its_typed_error_and_frees_the_others(llm, deployment):
    deployment.engine.fail_after = (2, "DeviceError")

    with pytest.raises(DeviceError, match="the step failed"):
        llm.generate([[5], [6]], SamplingParams(max_tokens=50))

    until(lambda: deployment.engine.num_running == 0)


def test_what_cannot_be_served_is_refused_before_anything_is_submitted(llm, deployment):
    with pytest.raises(RequestTooLongError, match="2048"):
        llm.generate([[5], [5] * 2048], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidParameterError, match="at least one token"):
        llm.generate([[]], SamplingParams())
    with pytest.raises(InvalidParameterError, match="parameters"):
        llm.generate([[5]], [])

    assert deployment.engine.submitted == []


def test_close_tears_down_and_later_calls_say_so(deployment):
    llm = LLM(load_config(CONFIG), start=lambda config: deployment)
    assert llm.report() == {"plan_version": 1}

    llm.close()
    llm.close()

    assert not deployment.is_running
    with pytest.raises(EngineUnavailableError, match="closed"):
        llm.generate([[5]], SamplingParams())
