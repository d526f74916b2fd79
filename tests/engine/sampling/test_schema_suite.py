"""For each supported schema in JSON Schema's test suite, complete answers are valid. Unsupported
schemas are refused.

The schemas belong to draft 2020-12 (see ``tests/data/README.md``). A model generates answers, both
greedily and randomly. If a schema does not limit the size of answers, most answers are cut off.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest

from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.sampling import SamplingParams, Structure, StructuredOutputs
from dist_aclgraph.text.grammar_process import compile_source
from dist_aclgraph.text.grammars import make_limits, open_tokenizer, vocabulary_of
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.engine.runners import make_runner, turn
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS
from tests.engine.steps.test_steps_in_flight import DEMO, make_scheduler
from tests.unit.scheduler.requests import submit

SUITE = Path(__file__).parents[2] / "data" / "json_schema_suite.json"
TOKENIZER = Tokenizer(DEMO)
GROUPS = json.loads(SUITE.read_text())["groups"]
MAX_TOKENS = 60
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 2.0, "seed": 2, "logit_bias": ((TOKENIZER.eos_ids[0], 20.0),)},
]


def compile_groups() -> tuple[dict[str, tuple[Any, str]], dict[str, str]]:
    """Compile the schema of each group of tests. Return (schema, grammar) of each supported schema,
    and the errors of the others.
    """
    tokenizer, limits = open_tokenizer(vocabulary_of(TOKENIZER)), make_limits()
    usable, refused = {}, {}
    for group in GROUPS:
        form = StructuredOutputs(json=json.dumps(group["schema"]))
        source = {"kind": form.kind, "text": form.text, "json_options": form.json_options}
        reply = compile_source(source, tokenizer, limits)
        if "grammar" in reply:
            usable[group["group"]] = group["schema"], reply["grammar"]
        else:
            refused[group["group"]] = reply["error"]
    return usable, refused


@pytest.mark.parametrize(
    "share", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["a tenth", "all"]
)
def test_answers_are_valid(npu: Any, share: int) -> None:
    usable, refused = compile_groups()
    assert all(reason and "\n" not in reason for reason in refused.values())
    settings = {
        "dtype": "float32",
        "scheduler": {"max_num_seqs": MAX_SEQS, "steps_in_flight": 2},
    }
    runner = make_runner(npu, DEMO, MAX_SEQS, EAGER.capture_order, 0, settings)
    scheduler = make_scheduler(GraphDispatcher(EAGER), 0, 60)
    answers: dict[str, list[int]] = {}
    kept = sorted(usable)[::share]
    for name in kept:
        for i, sampling in enumerate(SAMPLINGS):
            params = SamplingParams(
                max_tokens=MAX_TOKENS,
                stop_token_ids=TOKENIZER.eos_ids,
                ignore_eos=True,
                structure=Structure(grammar=usable[name][1]),
                **sampling,
            )
            scheduler.add(submit(f"{i} {name}", TOKENIZER.encode("json: "), params))
            answers[f"{i} {name}"] = []
    found: Counter[str] = Counter()
    while scheduler.has_work or runner.is_busy:
        outputs = turn(scheduler, runner)
        assert not outputs.failed
        for delta in outputs:
            answers[delta.request_id] += delta.tokens
            if delta.finish_reason is None:
                continue
            found[delta.finish_reason] += 1
            if delta.finish_reason == "stop":
                schema = usable[delta.request_id[2:]][0]
                text = TOKENIZER.decode(answers[delta.request_id][:-1])
                value = json.loads(text)
                validator = jsonschema.Draft202012Validator(schema)
                assert validator.is_valid(value), (delta.request_id, text)

    assert found["stop"] > len(kept)


def test_the_documented_version_of_the_library_is_installed() -> None:
    """The table in docs/use/structured.md is valid for this version of the library."""
    assert llguidance.__version__ == "1.9.1"
