"""``make bench-structured``: how much longer a decode step takes if some requests are constrained
by a grammar.

The engine's scheduler and a worker's runner take turns in one process, with two steps in flight. In
each step, some of the requests have a grammar, which comes from a typical JSON schema. The number
of these requests changes from turn to turn. The device's times are computed by a model
(``docs/develop/device-time.md``), and there are no weights. The models have the shapes of Qwen3-8B,
and of a dense DeepSeek of the same size with one draft. The device computes nothing, so its tokens
are arbitrary. Therefore the bench replaces tokens and drafts by the tokens of a valid answer before
the matchers read them. The vocabulary is generated. The results are no measurements of an NPU.

In a second part, requests with large schemas arrive while other requests decode. The bench measures
the steps during which such a request arrives, in two cases: the schema is new, or it was already
compiled for an earlier request.

The last part measures the ingress's CPU time per token, with and without a search for tool calls in
the text.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import llguidance
import llguidance.numpy
import numpy as np
import tokenizers
import typer

from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.report import Report, Table
from benchmarks.overlap import MEMORY_MB, dense_deepseek, qwen3
from benchmarks.step import make_rank, make_scheduler, run_steps
from benchmarks.structured_text import measure_text, text_table
from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.config import Config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.masks.matchers import Masks, Matchers
from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.engine.sampling.sampling_places import StepPlaces
from dist_aclgraph.sampling import Structure, StructuredOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RowSampling
from dist_aclgraph.text.grammars import make_limits, open_tokenizer, vocabulary_of
from dist_aclgraph.text.tokenizer import Tokenizer

VOCAB = 151_936
NOTE = "modelled device on the CPU; not an NPU figure"
BATCH, WARM_UP, ROUNDS = 32, 40, 8
NUM_SCHEMAS = 200  # number of schemas whose compilation is timed
# ARRIVALS is the number of requests that arrive, KEYS is the number of keys of each schema, and
# EVERY is the number of steps between two arrivals. Workers have room for ARRIVALS compiled
# schemas.
ARRIVALS, KEYS, EVERY = 4, 1500, 10
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "open", "closed"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "score": {"type": "number"},
    },
    "required": ["name", "age", "tags", "address", "score"],
    "additionalProperties": False,
}


def main(
    constrained: Annotated[str, typer.Option(help=f"Requests of {BATCH}.")] = "0,1,8,32",
    steps: Annotated[int, typer.Option(help="That are measured.")] = 400,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    report_bench(
        "structured",
        out,
        lambda folder, _: measure_all(folder, numbers(constrained), steps),
        report,
    )


def measure_all(folder: Path, constrained: Sequence[int], steps: int) -> dict[str, Any]:
    """Return the step times for each number of constrained requests, the times to compile schemas,
    and the times to compute masks.
    """
    models = [
        {**config, "vocab_size": VOCAB}
        for config in (qwen3(hidden=4096, layers=36, heads=32, ffn=12288), dense_deepseek())
    ]
    (folder / "config.json").write_text(json.dumps(models[0]))
    write_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    compiling = measure_compiling(tokenizer)
    arriving: list[dict[str, Any]] = []
    rows = []
    for num_drafts, model in enumerate(models):
        (folder / "config.json").write_text(json.dumps(model))
        rank, runner, found_config = make_rank(
            folder,
            (BATCH,),
            steps_in_flight=2,
            kernels="timed",
            memory_mb=MEMORY_MB,
            weights="dummy",
            speculative={"num_tokens": num_drafts},
        )
        # The device samples arbitrary tokens, which no grammar allows. So the matchers read the
        # tokens of a valid answer.
        answer = valid_answer(tokenizer, (1 + num_drafts) * (steps + 3 * WARM_UP))
        _Scripted.replace_tokens(runner._matchers, answer)
        for number, times in measure_steps(rank.npu, runner, found_config, constrained, steps):
            rows.append(
                {
                    "drafts": num_drafts,
                    "constrained": number,
                    "us": _percentile(times, 50),
                    "p99": _percentile(times, 99),
                }
            )
        if not num_drafts:
            arriving = measure_arrivals(rank.npu, runner, found_config, steps)
        runner.close()
    return {
        "note": NOTE,
        "rows": rows,
        "arriving": arriving,
        "compiling": compiling,
        "text": measure_text(tokenizer),
    }


def measure_steps(
    npu: Npu, runner: ModelRunner, config: Config, constrained: Sequence[int], steps: int
) -> Iterator[tuple[int, list[float]]]:
    """Measure steps with each number of constrained requests, in turns. For each number, yield this
    number and the durations of its steps in microseconds.
    """
    each: dict[int, list[float]] = {number: [] for number in constrained}
    for _ in range(ROUNDS):
        for number in constrained:
            measured = -(-steps // ROUNDS)
            scheduler = make_scheduler(
                config, BATCH, (BATCH,), 2 * (measured + 2 * WARM_UP), sampling_of(number)
            )
            found: list[float] = []
            begin_s = time.perf_counter()
            for step in run_steps(npu, runner, scheduler, measured + WARM_UP):
                found.append((time.perf_counter() - begin_s) * 1e6)
                begin_s = time.perf_counter()
                assert step
            each[number] += found[WARM_UP:]
            while runner.is_busy:
                scheduler.update([runner.finish()])
    yield from each.items()


def measure_arrivals(
    npu: Npu, runner: ModelRunner, config: Config, steps: int
) -> list[dict[str, Any]]:
    """Return the times of steps during which requests arrive, once with new schemas and once with
    schemas that are already compiled.
    """
    each: dict[str, list[float]] = {"new": [], "compiled": []}
    batch, measured = BATCH - ARRIVALS, max(-(-steps // ROUNDS), ARRIVALS * EVERY)
    for number in range(ROUNDS):
        forms = [_large(f"{number}_{index}") for index in range(ARRIVALS)]
        for times in each.values():
            scheduler = make_scheduler(
                config, batch, (BATCH,), measured + 2 * WARM_UP, sampling_of(0)
            )
            begin_s = time.perf_counter()
            for step, _ in enumerate(run_steps(npu, runner, scheduler, measured + WARM_UP)):
                if step >= WARM_UP:
                    times.append((time.perf_counter() - begin_s) * 1e6)
                    index, rest = divmod(step - WARM_UP, EVERY)
                    if rest == 0 and index < ARRIVALS:
                        scheduler.add(_arriving(index, forms[index]))
                begin_s = time.perf_counter()
            while runner.is_busy:
                scheduler.update([runner.finish()])
            while runner._matchers.take_report().compiling:
                time.sleep(0.01)
    return [
        {"schemas": name, "us": _percentile(times, 50), "p99": _percentile(times, 99)}
        for name, times in each.items()
    ]


def _large(name: str) -> str:
    """Return the grammar of a schema with many keys."""
    properties = {f"{name}_{key}": {"type": ["string", "integer"]} for key in range(KEYS)}
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps({"type": "object", "properties": properties})
    )


def _arriving(index: int, grammar: str) -> Request:
    sampling = RowSampling(num_prompt_tokens=4, structure=Structure(grammar=grammar, end_ids=(0,)))
    request = Request(f"new {index}", [1, 2, 3, 4], sampling, max_tokens=1)
    request.key = BATCH + index
    return request


def report(results: dict[str, Any]) -> Report:
    free = {row["drafts"]: row["us"] for row in results["rows"] if not row["constrained"]}
    lines = [
        [
            f"{row['constrained']} of {BATCH} constrained",
            f"{row['drafts']}",
            f"{row['us']:.0f}",
            f"{row['p99']:.0f}",
            f"{row['us'] / free[row['drafts']]:.3f}" if row["drafts"] in free else "",
        ]
        for row in results["rows"]
    ]
    arriving = [
        [f"{row['schemas']} schemas", f"{row['us']:.0f}", f"{row['p99']:.0f}"]
        for row in results["arriving"]
    ]
    compiling = [[name, f"{us:.0f}"] for name, us in results["compiling"].items()]
    return Report(
        "Steps with constrained requests",
        [
            Table(
                "Time of a step", ["requests", "drafts", "us, p50", "p99", "ratio of p50"], lines
            ),
            Table(
                f"Time of a step while {ARRIVALS} requests arrive, schemas of {KEYS} keys",
                ["requests", "us, p50", "p99"],
                arriving,
            ),
            text_table(results["text"]),
            Table(f"{NUM_SCHEMAS} schemas, {VOCAB} tokens", ["what", "us"], compiling),
        ],
    )


class _Scripted(Matchers):
    """Matchers that read the tokens of a valid answer instead of the tokens that the device
    sampled.
    """

    answer: list[int]
    starts: dict[int, int]  # for each row, the position of the first output token

    @classmethod
    def replace_tokens(cls, matchers: Matchers, answer: list[int]) -> None:
        """Change the class of a runner's matchers, so that they read the tokens of ``answer``."""
        matchers.__class__ = cls
        vars(matchers).update(answer=answer, starts={})

    def begin(self, row: int, sampling: RowSampling) -> None:
        self.starts[row] = sampling.num_prompt_tokens
        super().begin(row, sampling)

    def _tokens(self, row: int, begin: int, end: int) -> list[int]:
        super()._tokens(row, begin, end)  # only for its time: a real matcher makes this call
        start = self.starts[row]
        return self.answer[begin - start : end - start]

    def masks(self, step: HostStep, known: StepPlaces, drafts: IntArray | None) -> Masks | None:
        """Compute the masks of all positions. The next tokens of ``answer`` replace the drafts."""
        if drafts is not None:
            drafts = drafts.copy()
            firsts = (step.kv_lens[step.sampled] - step.num_logits + 1).tolist()
            for row, first in zip(step.sampled_rows.tolist(), firsts, strict=True):
                if row in self._rows:
                    at = first - self.starts[row]
                    drafts[row] = self.answer[at : at + drafts.shape[1]]
        return super().masks(step, known, drafts)


def sampling_of(constrained: int) -> list[dict[str, Any]]:
    """Return the sampling fields of each row. The argument is the number of rows that have a
    grammar.
    """
    form = StructuredOutputs(json=SCHEMA)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        form.text,
        overrides=form.json_options,  # type: ignore[arg-type]
    )
    structure = Structure(grammar=grammar, end_ids=(0,))
    return [{"structure": structure if i < constrained else None} for i in range(BATCH)]


def valid_answer(tokenizer: Tokenizer, length: int) -> list[int]:
    """Return the first ``length`` tokens of a valid answer: a JSON object whose last string does
    not end.
    """
    text = '{"name": "Ann Example", "age": 41, "tags": ["new", "open"], "address": {"street": "'
    rng = random.Random(1)
    while True:
        ids = tokenizer.encode(text)
        if len(ids) >= length:
            return ids[:length]
        text += "".join(rng.choices("abcdefghij klm", k=8 * length))


def write_tokenizer(path: Path) -> None:
    """Write the file of a byte-level tokenizer whose tokens are single bytes and random words."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary: dict[str, int] = {"<|end|>": 0}
    for letter in letters:
        vocabulary[letter] = len(vocabulary)
    rng, merges, words = random.Random(0), list[tuple[str, str]](), letters[:]
    while len(vocabulary) < VOCAB:
        one, other = rng.choice(words), rng.choice(letters)
        if one + other not in vocabulary and len(one) < 10:
            vocabulary[one + other] = len(vocabulary)
            merges.append((one, other))
            words.append(one + other)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def measure_compiling(tokenizer: Tokenizer) -> dict[str, float]:
    """Compile generated schemas, and compute their masks. Return percentiles of the times to
    compile a schema, and of the times to compute a mask.

    All times are in microseconds.
    """
    rng, prepared = random.Random(3), open_tokenizer(vocabulary_of(tokenizer))
    compiled, masks = [], []
    words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
    for _ in range(NUM_SCHEMAS):
        begin_s = time.thread_time()
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(_schema(rng, 3)))
        matcher = llguidance.LLMatcher(prepared, grammar, log_level=0, limits=make_limits())
        compiled.append((time.thread_time() - begin_s) * 1e6)
        assert not matcher.is_error(), matcher.get_error()
        for _ in range(40):
            begin_s = time.thread_time()
            llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
            masks.append((time.thread_time() - begin_s) * 1e6)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8)[0], bitorder="little"))
            matcher.consume_token(int(rng.choice(allowed.tolist())))
            if matcher.is_stopped():
                break
    return {
        f"{what}, p{q}": _percentile(times, q)
        for what, times in (("compile", compiled), ("mask", masks))
        for q in (50, 99)
    }


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(["string", "integer", "number", "boolean", "enum", "object", "array"])
    if kind == "enum":
        return {"enum": [f"value{i}" for i in range(rng.randint(1, 8))]}
    if kind == "object" and depth:
        names = [f"key{i}" for i in range(rng.randint(1, 8))]
        properties = {name: _schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": names[::2]}
    if kind == "array" and depth:
        return {"type": "array", "items": _schema(rng, depth - 1)}
    return {"type": kind if kind not in ("object", "array") else "string"}


def _percentile(values: Iterator[float] | Sequence[float], q: int) -> float:
    return float(np.percentile(np.array(list(values)), q))


if __name__ == "__main__":
    run_command(main)
