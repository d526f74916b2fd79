from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment.llm import LLM
from dist_aclgraph.actors.deployment.outputs import Logprob, RequestOutput
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import (
    ConfigError,
    DeviceError,
    EngineUnavailableError,
    InvalidParameterError,
    RequestTooLongError,
)
from dist_aclgraph.sampling import SamplingParams, StructuredOutputs
from tests.serve.conftest import CONFIG, until
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine
from tests.serve.rerank_model import make_reranker
from tests.text.made_tokenizers import KINDS, write_checkpoint

LONG = "x" * 300_000


class FakeDeployment:
    """A fake deployment. It consists of one fake engine in this process."""

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

    def restarts_left(self) -> int:
        return 4

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


def only(requests: list[RequestOutput]) -> RequestOutput:
    (request,) = requests
    return request


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", [70, 71], "two three"]

    found = llm.generate(prompts, SamplingParams(max_tokens=2))

    assert [request.prompt for request in found] == ["one", None, "two three"]
    assert [request.outputs[0].finish_reason for request in found] == ["length"] * 3
    assert all(request.finished for request in found)
    assert found[1].outputs[0].token_ids == found[1].prompt_token_ids == [70, 71]
    assert found[1].outputs[0].text == llm.tokenizer.decode([70, 71])


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm, deployment):
    ids = llm.tokenizer.encode("one STOP two") * 20
    deployment.engine.reply = lambda submit: ids

    (output,) = only(llm.generate("x", SamplingParams(max_tokens=500, stop=("TOP",)))).outputs

    assert (output.text, output.finish_reason, output.stop_reason) == ("one S", "stop", "TOP")
    until(lambda: deployment.engine.num_running == 0)


def test_without_max_tokens_the_context_is_the_limit(llm, deployment):
    deployment.engine.reply = lambda submit: [70, llm.tokenizer.eos_ids[0]]

    (output,) = only(llm.generate([5] * 2000, SamplingParams(max_tokens=None))).outputs

    assert deployment.engine.submitted[0].max_tokens == 48
    assert (output.text, output.finish_reason) == (llm.tokenizer.decode([70]), "stop")
    assert output.stop_reason is output.logprobs is None


def test_equal_seeds_are_kept_and_missing_ones_drawn(llm, deployment):
    params = [SamplingParams(max_tokens=1, seed=seed) for seed in (3, None, -1, -1)]

    llm.generate([[5]] * 4, params)

    first, *others = (submit.sampling.seed for submit in deployment.engine.submitted)
    assert first == 3
    assert len({0, -1, *others}) == 5


def test_logprobs_are_by_token_id_with_rank_and_text(llm):
    (output,) = only(llm.generate([70, 71], SamplingParams(max_tokens=2, logprobs=2))).outputs

    own, best = llm.tokenizer.own_text, [60, 61]
    assert output.logprobs == [
        {
            token_id: Logprob(-0.5, 1, own(token_id)),
            60: Logprob(-0.75, 1, own(60)),
            61: Logprob(-1.0, 2, own(61)),
        }
        for token_id in (70, 71)
    ]
    assert [list(at) for at in output.logprobs] == [[70, *best], [71, *best]]
    assert output.cumulative_logprob == -1.0


def test_prompt_logprobs_begin_with_none(llm):
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, n=2)

    found = only(llm.generate([70, 71, 72, 73], params))

    assert found.prompt_logprobs[0] is None
    assert [next(iter(at.items())) for at in found.prompt_logprobs[1:]] == [
        (token_id, Logprob(-float(place), 9, llm.tokenizer.own_text(token_id)))
        for place, token_id in enumerate((71, 72, 73), start=1)
    ]


def test_a_prompt_may_be_text_ids_or_a_mapping(llm):
    params = SamplingParams(max_tokens=1)
    ids = llm.tokenizer.encode("one")

    nulls = {"prompt_token_ids": None, "multi_modal_data": None}
    mappings = ({"prompt": "one"}, {"prompt_token_ids": ids}, {"prompt": "one", **nulls})
    for prompts in ("one", ids, *mappings):
        for given in (prompts, [prompts]):
            assert only(llm.generate(given, params)).prompt_token_ids == ids
    with pytest.raises(InvalidParameterError, match="multi_modal_data"):
        llm.generate({"prompt": "x", "multi_modal_data": {}}, params)
    with pytest.raises(InvalidParameterError, match="must have prompt or prompt_token_ids"):
        llm.generate(nulls, params)
    assert llm.generate([], params) == []


def test_prompts_may_have_a_cache_salt(llm, deployment):
    llm.generate([{"prompt": "one", "cache_salt": "mine"}, "two"], SamplingParams(max_tokens=1))

    assert sorted(submit.cache_salt for submit in deployment.engine.submitted) == ["", "mine"]
    with pytest.raises(InvalidParameterError, match="cache_salt is 5"):
        llm.generate({"prompt": "one", "cache_salt": 5})


def test_prompts_may_be_any_iterable_and_ids_may_be_numpys(llm):
    params = SamplingParams(max_tokens=1)
    ids = llm.tokenizer.encode("one two")

    for prompts in (iter(["one two"]), np.array(ids), [np.array(ids)], [list(np.array(ids))]):
        request = only(llm.generate(prompts, params))
        assert request.prompt_token_ids == ids
        assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    for wrong in (None, 5, [[1.5]], [["a"]]):
        with pytest.raises(InvalidParameterError, match="must be text or a list of token ids"):
            llm.generate(wrong, params)
    for given in ({"max_tokens": 1}, [params, None]):
        with pytest.raises(InvalidParameterError, match="it must have SamplingParams"):
            llm.generate(["a", "b"], given)


def test_a_text_of_any_length_may_be_truncated(llm):
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=3)

    found = llm.generate([LONG, {"prompt": LONG}], params)
    found += llm.chat([{"role": "user", "content": LONG}], params)

    assert [len(request.prompt_token_ids) for request in found] == [3] * 3
    with pytest.raises(RequestTooLongError, match="the maximum context length is 2048"):
        llm.generate(LONG, SamplingParams(max_tokens=1))


def test_n_answers_have_seeds_in_a_row(llm, deployment):
    params = SamplingParams(max_tokens=1, seed=3, n=3)

    found = only(llm.generate("one", params))

    assert [output.index for output in found.outputs] == [0, 1, 2]
    assert sorted(submit.sampling.seed for submit in deployment.engine.submitted) == [3, 4, 5]


def test_without_parameters_the_models_own_hold(llm, deployment, monkeypatch):
    monkeypatch.setattr(llm, "_sampling_defaults", {"temperature": 0.25, "top_k": 7})

    llm.generate("one")

    (submit,) = deployment.engine.submitted
    assert (submit.sampling.temperature, submit.sampling.top_k) == (0.25, 7)


def test_a_recommended_maximum_is_cut_to_the_context(llm, deployment, monkeypatch):
    monkeypatch.setattr(llm, "_sampling_defaults", {"max_tokens": 5000})
    deployment.engine.reply = lambda submit: [70, llm.tokenizer.eos_ids[0]]
    defaults = llm.get_default_sampling_params()
    defaults.temperature = 0.5

    llm.generate([5] * 2000)
    llm.generate([5] * 2000, defaults)

    assert [submit.max_tokens for submit in deployment.engine.submitted] == [48, 48]
    assert deployment.engine.submitted[1].sampling.temperature == 0.5
    with pytest.raises(RequestTooLongError, match="4999 more were asked for"):
        llm.generate([5] * 2000, SamplingParams(max_tokens=4999))


def test_a_prompt_is_not_truncated_for_a_recommended_maximum(llm, deployment, monkeypatch):
    monkeypatch.setattr(llm, "_sampling_defaults", {"max_tokens": 5000})
    params = llm.get_default_sampling_params()
    params.truncate_prompt_tokens = -1

    found = only(llm.generate([5] * 2000, params))
    long = only(llm.generate([5] * 3000, params))

    assert (len(found.prompt_token_ids), len(long.prompt_token_ids)) == (2000, 2047)
    assert [submit.max_tokens for submit in deployment.engine.submitted] == [48, 1]


@pytest.mark.parametrize(
    "changed",
    [
        {"logit_bias": None, "bad_words": None, "allowed_token_ids": None, "stop": None},
        {"logit_bias": {5: 1.0}, "bad_words": ["a"], "stop": ["b"], "stop_token_ids": [3]},
        {"detokenize": True, "output_kind": 2, "spaces_between_special_tokens": True},
        {"truncate_prompt_tokens": None},
    ],
)
def test_parameters_of_vllm_are_those_of_the_constructor_or_set_later(llm, deployment, changed):
    given, later = SamplingParams(max_tokens=64, **changed), SamplingParams()
    for name, value in {"max_tokens": 64, **changed}.items():
        setattr(later, name, value)

    for params in (given, later):
        llm.generate("x", params, lora_request=None, priority=[0])
        llm.chat([{"role": "user", "content": "x"}], params, chat_template_content_format="auto")

    assert {submit.max_tokens for submit in deployment.engine.submitted} == {64}
    first, _, third, _ = deployment.engine.submitted
    assert replace(first.sampling, seed=0) == replace(third.sampling, seed=0)


def test_a_value_that_is_set_later_is_checked_when_it_is_used(llm, deployment):
    params = SamplingParams()
    params.temperature = 3.0

    with pytest.raises(InvalidParameterError, match=r"temperature is 3\.0"):
        llm.generate("x", params)
    with pytest.raises(InvalidParameterError, match="LoRA is not offered"):
        llm.generate("x", lora_request=object())
    assert deployment.engine.submitted == []


def test_outputs_have_the_fields_of_vllm(llm, deployment):
    params = SamplingParams(max_tokens=3, detokenize=False, truncate_prompt_tokens=2)

    found = only(llm.generate([5, 6, 7], params))

    assert found.prompt_token_ids == [6, 7]
    assert (found.outputs[0].text, found.outputs[0].token_ids) == ("", [6, 7, 6])
    names = ("metrics", "lora_request", "encoder_prompt", "encoder_prompt_token_ids")
    assert [getattr(found, name) for name in names] == [None] * 4
    assert found.outputs[0].lora_request is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_is_the_end_of_the_decoded_whole(deployment, tmp_path, kind):
    write_checkpoint(tmp_path, kind, {})
    config = load_config(CONFIG, {"model": str(tmp_path), "weights": "dummy"})
    with LLM(config, start=lambda config: deployment) as llm:
        random, size = Random(kind), llm.tokenizer.vocab_size
        answers = [[random.randrange(size) for _ in range(20)] for _ in range(6)]
        prompts = [llm.tokenizer.encode(text) for text in ("1 + 1 =", "größe 🦊")] * 3
        by_prompt = iter(answers)
        deployment.engine.reply = lambda submit: next(by_prompt)
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0)

        found = [only(llm.generate(prompt, params)).outputs[0] for prompt in prompts]

    for prompt, ids, output in zip(prompts, answers, found, strict=True):
        whole, before = llm.tokenizer.decode([*prompt, *ids]), llm.tokenizer.decode(prompt)
        assert (output.token_ids, output.text) == (ids, whole[len(before) :])
        assert [list(row) for row in output.logprobs] == [[token_id] for token_id in ids]


def test_chat_takes_one_conversation_or_several(llm):
    asked = [{"role": "user", "content": "Count."}]
    params = SamplingParams(max_tokens=1)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)

    found = [*llm.chat(asked, params), *llm.chat([asked, asked], params)]

    assert [request.prompt for request in found] == [text] * 3
    assert found[0].prompt_token_ids == tokenizer.encode_chat(asked)
    assert only(llm.chat(asked, params, False, mm_processor_kwargs=None)).prompt == text
    ids = tokenizer.apply_chat_template(asked, None, None, "default", add_generation_prompt=True)
    assert ids == found[0].prompt_token_ids
    with pytest.raises(InvalidParameterError, match="mm_processor_kwargs is given"):
        llm.chat(asked, params, mm_processor_kwargs={})


def test_the_tokenizer_renders_tools_as_chat_does(llm):
    asked = [{"role": "user", "content": "Count."}]
    tools = [{"type": "function", "function": {"name": "clock"}}]
    tokenizer = llm.get_tokenizer()

    request = only(llm.chat(asked, SamplingParams(max_tokens=1), tools=tools))

    ids = tokenizer.apply_chat_template(asked, tools, add_generation_prompt=True)
    assert request.prompt_token_ids == ids


def test_a_model_is_enough_and_options_are_those_of_vllm(deployment):
    model = str(Path(CONFIG).parents[1] / "models" / "tiny-qwen3")

    with LLM(
        model,
        tensor_parallel_size=2,
        compilation_config={"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]},
        start=lambda config: deployment,
    ) as llm:
        assert llm.config.name == "tiny-qwen3"
        assert llm.config.parallel.tp == 2
        assert (llm.config.graph.mode, llm.config.graph.sizes) == ("FULL", (1, 2))
    with pytest.raises(ConfigError, match="pipeline_parallel_size has no counterpart"):
        LLM(model=model, pipeline_parallel_size=2)


def test_a_failed_request_raises_its_typed_error_and_frees_the_others(llm, deployment):
    deployment.engine.fail_after = (2, "DeviceError")

    with pytest.raises(DeviceError, match="the step failed"):
        llm.generate([[5], [6]], SamplingParams(max_tokens=50))

    until(lambda: deployment.engine.num_running == 0)


def test_invalid_prompts_are_refused_before_any_prompt_is_submitted(llm, deployment):
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


def test_structured_outputs_reach_the_engine_as_a_grammar(llm, deployment):
    form = StructuredOutputs(regex="[0-9]{3}")

    llm.generate("a", SamplingParams(max_tokens=2, structured_outputs=form))

    assert "[0-9]{3}" in deployment.engine.submitted[-1].sampling.structure.grammar

    llm.generate("a", SamplingParams(max_tokens=2, structured_outputs={"choice": ["yes"]}))

    assert '"yes"' in deployment.engine.submitted[-1].sampling.structure.grammar


@pytest.fixture
def embedder(deployment):
    with LLM(load_config(CONFIG, {"task": "embed"}), start=lambda config: deployment) as llm:
        yield llm


def test_embeddings_come_in_the_order_of_the_prompts(embedder, deployment):
    deployment.engine.embedding = lambda ids: [3.0 * len(ids), 4.0 * len(ids), 12.0 * len(ids)]

    found = embedder.embed(["one", [70, 71]])
    (cut,) = embedder.embed([70, 71], dimensions=2)

    ids = embedder.tokenizer.encode("one")
    assert [each.prompt_token_ids for each in found] == [ids, [70, 71]]
    for each in found:
        assert each.outputs.embedding == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert cut.outputs.embedding == pytest.approx([0.6, 0.8])


def test_embeddings_take_the_arguments_of_vllm(embedder, deployment):
    deployment.engine.embedding = lambda ids: [1.0, 0.0]
    nothing = {"lora_request": None, "pooling_params": None}

    (found,) = embedder.embed(LONG, truncate_prompt_tokens=3, **nothing)

    assert len(found.prompt_token_ids) == 3
    with pytest.raises(InvalidParameterError, match="pooling_params is given, but the checkpoint"):
        embedder.embed("x", pooling_params=object())


@pytest.mark.parametrize("dimensions", [0, 10**6])
def test_dimensions_are_at_most_the_size_of_the_model(embedder, dimensions):
    with pytest.raises(InvalidParameterError, match=f"dimensions is {dimensions}; it must lie"):
        embedder.embed("x", dimensions=dimensions)


def test_pairs_have_scores(deployment, tmp_path):
    directory = make_reranker(tmp_path)
    config = load_config(CONFIG, {"model": str(directory), "task": "rerank"})
    with LLM(config, start=lambda config: deployment) as llm:
        deployment.engine.share = lambda ids: 0.25 if "bad" in llm.tokenizer.decode(ids) else 0.75

        found = llm.score("q", ["bad", "good"])
        (own,) = llm.score("q", "good", instruction="bad")
        (cut,) = llm.score("q", "good " * 9000, truncate_prompt_tokens=-1, lora_request=None)

    assert len(cut.prompt_token_ids) == 2047
    assert [each.outputs.score for each in found] == pytest.approx([0.25, 0.75])
    assert own.outputs.score == pytest.approx(0.25)


def test_a_model_has_one_task(llm, embedder):
    for call, words in [
        (llm.embed, "embed needs a model of the task embed; this model has the task generate"),
        (embedder.generate, "generate needs a model of the task generate or rerank"),
        (embedder.chat, "chat needs"),
    ]:
        with pytest.raises(InvalidParameterError, match=words):
            call("x")
    with pytest.raises(InvalidParameterError, match="score needs a model of the task rerank"):
        llm.score("x", "y")
