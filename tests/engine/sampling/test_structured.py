"""Law: rows with grammars get valid outputs. The outputs are the same for any number of drafts and
for any number of steps in flight.

Grammars do not change the outputs of rows without grammars. The law also holds if the group is
lost, and the next group gets the requests with their tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import llguidance
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dist_aclgraph.config import SchedulerConfig
from dist_aclgraph.engine.masks import grammar_row
from dist_aclgraph.engine.masks.grammar_row import NotReadyError
from dist_aclgraph.engine.masks.grammars import Grammars
from dist_aclgraph.engine.masks.slow_row import SlowRow
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.errors import GrammarError
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import Checkpoints
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.sampling import SamplingParams, Structure
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.engine.runners import BLOCK_SIZE, MAX_LEN, make_runner, turn
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, Arrival, arrivals
from tests.engine.steps.test_steps_in_flight import DEMO, Got, capture, make_scheduler, play
from tests.laws import examples
from tests.plans import make_plan
from tests.slow import slow
from tests.unit.scheduler.requests import submit

TOKENIZER = Tokenizer(DEMO)
END = TOKENIZER.eos_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
PATTERN = r"[ab]{3,6}(, [0-9]{2})?"
CHOICES = ["yes", "no", "maybe not"]


def is_object(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "n"} and len(found["name"]) <= 4 and 0 <= found["n"] <= 99


def thought(**fields: Any) -> Structure:
    """Return a structure that allows reasoning between the tokens 300 and 301."""
    return Structure(think_begin=300, think_end=301, **fields)


GRAMMARS = {
    "json": llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), overrides={"whitespace_pattern": r"[\x20\x0A]{0,2}"}
    ),
    "regex": llguidance.LLMatcher.grammar_from_regex(PATTERN),
    "choice": llguidance.grammar_from("choice", json.dumps(CHOICES)),
}
VALID = {
    "json": is_object,
    "regex": lambda text: re.fullmatch(PATTERN, text) is not None,
    "choice": CHOICES.__contains__,
}
STRUCTURED = {
    name: {"stop_token_ids": (END,), "ignore_eos": True, "structure": Structure(grammar=grammar)}
    for name, grammar in GRAMMARS.items()
}
RANDOM = {"temperature": 1.0, "seed": 4}
SAMPLINGS: list[tuple[str, dict[str, Any]]] = [
    ("", {"logprobs": 1}),
    ("", RANDOM),
    ("json", STRUCTURED["json"]),
    ("json", STRUCTURED["json"] | RANDOM | {"repetition_penalty": 1.2}),
    ("regex", STRUCTURED["regex"] | RANDOM | {"top_p": 0.9, "min_tokens": 3}),
    ("choice", STRUCTURED["choice"] | {"logprobs": 2}),
    (
        "json",
        STRUCTURED["json"]
        | {"structure": thought(grammar=GRAMMARS["json"], is_slow=True, max_thought=2)}
        | RANDOM,
    ),
    ("regex", STRUCTURED["regex"] | {"structure": thought(grammar=GRAMMARS["regex"])} | RANDOM),
    (
        "json",
        STRUCTURED["json"]
        | {"structure": thought(grammar=GRAMMARS["json"], is_thinking=True, max_thought=3)},
    ),
]


@pytest.fixture(scope="module")
def runners(npu: Any) -> list[tuple[int, GraphPlan, ModelRunner]]:
    """Runners with different numbers of drafts (0 to 3) and of steps in flight (one or two), with
    or without graphs.
    """
    found = []
    for k, in_flight, has_graphs in (
        (0, 1, False),
        (0, 2, True),
        (1, 2, False),
        (2, 1, False),
        (3, 2, True),
    ):
        q = k + 1
        decode = tuple(q * size for size in (1, 2, 4, MAX_SEQS))
        plan = EAGER
        if has_graphs:
            plan = make_plan(*decode, mixed=(8, 48), query_len=q, max_num_seqs=MAX_SEQS)
        scheduler = {"max_num_seqs": MAX_SEQS, "steps_in_flight": in_flight}
        settings = {"dtype": "float32", "scheduler": scheduler}
        runner = make_runner(npu, DEMO, MAX_SEQS, plan.capture_order, k, settings)
        for graph in plan.capture_order:
            capture(runner, graph)
        found.append((k, plan, runner))
    return found


# Indexes of ``runners``. Quick tests use 1 (graphs, two steps in flight) and 3 (two drafts); slow
# tests also use the runners 0 and 2.
PLACES = pytest.mark.parametrize("place", [slow(0), 1, slow(2), 3])


def answer_of(structure: Structure, tokens: list[int]) -> list[int]:
    """Return the tokens after the reasoning."""
    if structure.think_end >= 0 and (structure.is_thinking or tokens[:1] == [300]):
        return tokens[tokens.index(301) + 1 :]
    return tokens


@examples(12)
@given(
    arrivals,
    st.lists(st.integers(0, len(SAMPLINGS) - 1), min_size=9, max_size=9),
    st.integers(12, 40),
    st.sets(st.integers(1, 30), max_size=2),
)
@example([Arrival(0, (1, 2, 3), 20, None)], [2] * 9, 40, {5, 9})
def test_outputs_are_valid_and_do_not_depend_on_drafts_flights_or_neighbours(
    runners: Any, arrivals: list[Arrival], kinds: list[int], num_blocks: int, deaths: set[int]
) -> None:
    arrivals = [replace(a, max_tokens=a.max_tokens + 20) for a in arrivals]
    names, samplings = zip(*(SAMPLINGS[kind] for kind in kinds), strict=True)
    results = [
        play(runner, plan, arrivals, num_blocks, k, samplings, {}, deaths)
        for k, plan, runner in runners
    ]
    free = [i for i, arrival in enumerate(arrivals) if not names[i]]
    k, plan, runner = runners[0]
    alone = play(
        runner, plan, [arrivals[i] for i in free], num_blocks, k, [samplings[i] for i in free], {}
    )

    for index, arrival in enumerate(arrivals):
        got: list[Got] = [result[str(index)] for result in results]
        if arrival.abort_at is not None:
            length = min(len(one.tokens) for one in got)
            assert len({tuple(one.tokens[:length]) for one in got}) == 1
            continue
        assert len({(tuple(one.tokens), one.reasons[-1]) for one in got}) == 1, names[index]
        if index in free:
            assert got[0].tokens == alone[str(free.index(index))].tokens
        elif got[0].reasons[-1] == "stop":
            *tokens, last = answer_of(samplings[index]["structure"], got[0].tokens)
            assert last == END
            text = TOKENIZER.decode(tokens)
            assert VALID[names[index]](text), text


def test_a_grammar_that_fails_ends_its_request_and_no_other(runners: Any) -> None:
    for k, plan, runner in runners:
        scheduler = make_scheduler(GraphDispatcher(plan), k)
        bad = Structure(grammar="start: nothing_like_this")
        for name, structure in (("bad", bad), ("good", None)):
            params = SamplingParams(max_tokens=5, temperature=0.0, structure=structure)
            scheduler.add(submit(name, [1, 2, 3], params))
        failed, got = [], []
        while scheduler.has_work or runner.is_busy:
            outputs = turn(scheduler, runner)
            failed += outputs.failed
            got += [token for delta in outputs for token in delta.tokens]
            assert all(delta.request_id == "good" for delta in outputs)

        ((request, error),) = failed
        assert request.request_id == "bad"
        assert isinstance(error, GrammarError)
        assert len(got) == 5
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event. Grammars are compiled only after the test has set the event."""
    gate, compile_now = threading.Event(), Grammars._compile

    def compile_late(grammars: Grammars, grammar: str) -> llguidance.LLMatcher:
        assert gate.wait(60), "a step waits for a grammar"
        return compile_now(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    yield gate
    gate.set()


def play_late(
    scheduler: Scheduler,
    runner: ModelRunner,
    samplings: Sequence[dict[str, Any]],
    gate: threading.Event,
) -> dict[str, list[int]]:
    """Return the tokens of each request.

    The first request has no grammar. Grammars are compiled only after this request has 20 tokens.
    """
    got: dict[str, list[int]] = {}
    for index, sampling in enumerate(samplings):
        settings = {"temperature": 0.0, **sampling}
        if settings.get("structure"):
            settings["structure"] = replace(settings["structure"], salt="late")
        params = SamplingParams(max_tokens=40, **settings)
        scheduler.add(submit(str(index), [5 + index, 6, 7], params))
        got[str(index)] = []
    while scheduler.has_work or runner.is_busy:
        for delta in turn(scheduler, runner):
            got[delta.request_id] += delta.tokens
        if len(got["0"]) >= 20 and not gate.is_set():
            for index, sampling in enumerate(samplings):
                structure = sampling.get("structure")
                if structure is not None:  # until its grammar is compiled, a request only reasons
                    most = structure.max_thought + 1 if structure.is_thinking else 0
                    assert len(got[str(index)]) == most
            gate.set()
    return got


@PLACES
def test_free_requests_run_while_grammars_are_compiled(
    runners: Any, place: int, gate: threading.Event
) -> None:
    k, plan, runner = runners[place]
    # Without a mask, the first token violates the grammar. This token is discarded, and penalties
    # must not count it.
    grammar = llguidance.LLMatcher.grammar_from_regex("%%[^%]{30}")
    (letter,) = TOKENIZER.encode("a", add_special_tokens=False)
    counted = STRUCTURED["regex"] | {
        "structure": Structure(grammar=grammar),
        "frequency_penalty": 2.0,
        "logit_bias": {letter: 20.0},
        **RANDOM,
    }
    samplings = [SAMPLINGS[0][1], SAMPLINGS[4][1], SAMPLINGS[-1][1], counted]

    late = play_late(make_scheduler(GraphDispatcher(plan), k), runner, samplings, gate)
    compiled = play_late(make_scheduler(GraphDispatcher(plan), k), runner, samplings, gate)

    assert late == compiled


def test_a_request_alone_gets_its_answer_when_its_grammar_is_compiled(
    runners: Any, gate: threading.Event
) -> None:
    k, plan, runner = runners[1]
    scheduler = make_scheduler(GraphDispatcher(plan), k)
    structure = Structure(grammar=GRAMMARS["choice"], salt="alone")
    params = SamplingParams(
        max_tokens=20, temperature=0.0, stop_token_ids=(END,), ignore_eos=True, structure=structure
    )
    scheduler.add(submit("alone", [5, 6], params))
    for _ in range(10):
        assert not list(turn(scheduler, runner))
    gate.set()
    tokens = []
    while scheduler.has_work or runner.is_busy:
        tokens += [token for delta in turn(scheduler, runner) for token in delta.tokens]

    assert TOKENIZER.decode(tokens[:-1]) in CHOICES


def test_a_hybrid_runs_its_prompt_once_more_when_its_grammar_is_compiled(
    npu: Any, gate: threading.Event
) -> None:
    runner = make_runner(npu, DEMO.with_name("tiny-qwen3.5"), MAX_SEQS)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=64),
        [BlockPool(40, BLOCK_SIZE, checkpoints=Checkpoints(0, 1))],
        GraphDispatcher(EAGER),
        max_model_len=MAX_LEN,
    )
    structure = Structure(grammar=GRAMMARS["choice"], salt="hybrid")
    params = SamplingParams(max_tokens=8, temperature=0.0, structure=structure)
    scheduler.add(submit("alone", range(5, 45), params))
    for _ in range(20):
        assert not list(turn(scheduler, runner))
    gate.set()
    # One thread compiles all grammars, so this call runs only after the compilation.
    runner._matchers._grammars._thread.submit(bool).result(60)
    tokens = []
    while scheduler.has_work or runner.is_busy:
        tokens += [token for delta in turn(scheduler, runner) for token in delta.tokens]

    assert any(choice.startswith(TOKENIZER.decode(tokens)) for choice in CHOICES)
    assert scheduler.num_preemptions == 1


# These rules contain each other, so a matcher must try many of them at each letter.
MANY = "\n".join(
    f'r{i}: (r{(7 * i + 1) % 99} | "") (r{(11 * i + 3) % 99} | "x") r{5 * i % 99} | /[a-z]/'
    for i in range(99)
)
AMBIGUOUS = llguidance.grammar_from("lark", f'start: "[" "[" "[" r0\n{MANY}')


@pytest.mark.parametrize("limit_s", [0.0, 1e9])
@PLACES
def test_an_ambiguous_grammar_ends_its_request_and_no_other(
    runners: Any, place: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_row, "MAX_MASK_S", limit_s)
    k, plan, runner = runners[place]
    scheduler = make_scheduler(GraphDispatcher(plan), k)
    bad = Structure(grammar=AMBIGUOUS if limit_s else GRAMMARS["json"], is_slow=True)
    for name, structure in (("bad", bad), ("good", None)):
        params = SamplingParams(max_tokens=30, temperature=0.0, structure=structure)
        scheduler.add(submit(name, [1, 2, 3], params))
    failed, got = [], []
    while scheduler.has_work or runner.is_busy:
        outputs = turn(scheduler, runner)
        failed += outputs.failed
        got += [token for delta in outputs for token in delta.tokens if delta.request_id == "good"]

    ((request, error),) = failed
    assert request.request_id == "bad"
    assert str(error).startswith("the grammar of the answer failed: it is too ambiguous")
    assert len(got) == 30


@PLACES
def test_free_requests_run_while_a_mask_is_computed(
    runners: Any, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, plan, runner = runners[place]
    structure = replace(STRUCTURED["regex"]["structure"], is_slow=True, salt="slow")
    samplings = [SAMPLINGS[0][1], STRUCTURED["regex"] | RANDOM | {"structure": structure}]
    expected = play_all(make_scheduler(GraphDispatcher(plan), k), runner, samplings)
    gate, compute = threading.Event(), SlowRow._compute

    def compute_late(row: SlowRow, output: list[int]) -> tuple[Any, str]:
        assert len(output) < 3 or gate.wait(60), "a step waits for a mask"
        return compute(row, output)

    monkeypatch.setattr(SlowRow, "_compute", compute_late)
    found = play_all(make_scheduler(GraphDispatcher(plan), k), runner, samplings, gate)

    assert found == expected
    assert gate.is_set()


@PLACES
def test_a_mask_that_is_ready_one_step_late_is_used(
    runners: Any, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, plan, runner = runners[place]
    structure = replace(STRUCTURED["regex"]["structure"], is_slow=True, salt="late")
    samplings = [SAMPLINGS[0][1], STRUCTURED["regex"] | RANDOM | {"structure": structure}]
    expected = play_all(make_scheduler(GraphDispatcher(plan), k), runner, samplings)
    fill, num_late = SlowRow.fill_aside, 0

    def fill_late(row: SlowRow, output: list[int], words: Any, patience_s: float) -> str:
        nonlocal num_late
        try:
            return fill(row, output, words, 0.0)
        except NotReadyError:
            num_late += 1
            wait([mask for mask in (row._mask, row._coming) if mask is not None])
            raise

    monkeypatch.setattr(SlowRow, "fill_aside", fill_late)
    found = play_all(make_scheduler(GraphDispatcher(plan), k), runner, samplings)

    assert found == expected
    assert num_late > 0


def play_all(
    scheduler: Scheduler,
    runner: ModelRunner,
    samplings: Sequence[dict[str, Any]],
    gate: threading.Event | None = None,
) -> dict[str, list[int]]:
    """Return the tokens of each request; set the gate when the first request has 40 tokens."""
    got: dict[str, list[int]] = {}
    for index, sampling in enumerate(samplings):
        params = SamplingParams(max_tokens=60, **{"temperature": 0.0, **sampling})
        scheduler.add(submit(str(index), [5 + index, 6, 7], params))
        got[str(index)] = []
    while scheduler.has_work or runner.is_busy:
        for delta in turn(scheduler, runner):
            got[delta.request_id] += delta.tokens
        if gate is not None and len(got["0"]) >= 40 and not gate.is_set():
            assert len(got["1"]) <= 3
            gate.set()
    return got


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "lists",
    [
        {"allowed_token_ids": (600, 601)},
        {"bad_word_ids": tuple((token,) for token in range(832) if token != END)},
        {"bad_word_ids": tuple((ids_of("y")[0], token) for token in range(832))},
    ],
    ids=["allowed", "single", "several"],
)
@PLACES
def test_lists_that_forbid_all_that_a_form_allows_end_the_request_with_an_error(
    runners: Any, place: int, lists: dict[str, Any]
) -> None:
    k, plan, runner = runners[place]
    scheduler = make_scheduler(GraphDispatcher(plan), k)
    grammar = llguidance.LLMatcher.grammar_from_regex("y[a-z]{3}")
    fields = STRUCTURED["regex"] | {"structure": Structure(grammar=grammar)} | lists
    scheduler.add(submit("bad", [1, 2], SamplingParams(max_tokens=9, temperature=0.0, **fields)))
    failed, reasons = [], []
    while scheduler.has_work or runner.is_busy:
        outputs = turn(scheduler, runner)
        failed += outputs.failed
        reasons += [delta.finish_reason for delta in outputs]

    ((_, error),) = failed
    assert "allowed_token_ids or bad_words forbid every token" in str(error)
    assert not any(reasons)


@PLACES
def test_the_end_of_a_form_need_not_be_in_the_allowed_tokens(runners: Any, place: int) -> None:
    k, plan, runner = runners[place]
    fields = STRUCTURED["choice"] | {"allowed_token_ids": ids_of("yes")}
    arrival = Arrival(0, (1, 2), 9, None)

    got = play(runner, plan, [arrival], 40, k, fields, {})["0"]

    assert got.reasons[-1] == "stop"
    assert TOKENIZER.decode(got.tokens[:-1]) == "yes"
