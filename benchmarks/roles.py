"""Long prompts and decoding requests, with and without a prefill group (``make bench-kv``).

Two deployments of one model take turns. In the first deployment, each of two groups computes
prompts and decodes. In the second deployment, one group only computes long prompts; the other group
reads the KV of these prompts from files, computes short prompts, and decodes. The time model
(``docs/develop/device-time.md``) computes the device's times, and there are no weights. The host
does all work that serving requires, and the files contain all bytes of the KV. The figures say
nothing about an NPU.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.progress import Progress

from benchmarks.common.command import report_bench, run_command
from benchmarks.common.engine import NUM_WORDS, DecodeEngine
from benchmarks.common.report import Report, Table
from benchmarks.common.turns import ray_for
from benchmarks.common.workload import SILENCE_S, percentile
from benchmarks.overlap import MODELS, modelled_engine
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta

MODEL = "Qwen3-8B"
# The published model has eight KV heads. With one KV head, a token's KV has 18 KB. With eight KV
# heads, two cores would need longer to write and read the files of a prompt than the modelled
# device needs to compute the prompt.
NUM_KV_HEADS = 1
NUM_GROUPS, MAX_BATCH, NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 2, 32, 1024, 128, 8192
STEP_TOKENS = 2048  # limit of a step's tokens
HOST_GIB = 4.0
SHORT = 32  # tokens of a short prompt, and of the prompt of a stream
LONG = 2048, 4096  # minimum and maximum number of tokens of a long prompt
INTERVAL_S = 1.0  # mean time between two long prompts, and between two short prompts
# BEFORE is the number of tokens that each stream has before prompts arrive. The other two are the
# numbers of tokens of the answers to short and to long prompts.
BEFORE, SHORT_TOKENS, LONG_TOKENS = 8, 8, 16
STREAM, STREAMS = "stream", 16
# A decode step takes longer than this, so a stream of T / STEP_S tokens lasts longer than T s.
STEP_S = 0.012
ALL, ROLES = "both groups do everything", "one group computes long prompts"
WAYS: dict[str, dict[str, Any]] = {
    ALL: {},
    ROLES: {"prefill_groups": 1, "prefill_from_tokens": LONG[0] // 2},
}
FIGURES = {
    "between tokens of streams, p50": "gap_50",
    "the same, p99": "gap_99",
    "first token of long prompts, p50": "long_50",
    "the same, p90": "long_90",
    "from their first to their second token, p50": "second_50",
    "first token of short prompts, p50": "short_50",
    "the same, p90 ": "short_90",
}
NOTE = "modelled device (A2), real host; not a figure of an NPU"

Times = dict[str, list[float]]  # times in milliseconds, by the names of measured quantities


class Arrival(NamedTuple):
    """A request that is sent ``at_s`` seconds after the streams have begun."""

    at_s: float
    kind: str
    prompt: list[int]
    max_tokens: int


def arrivals(count: int, seed: int) -> list[Arrival]:
    """Return ``count`` long and ``count`` short prompts in random order, at random times."""
    random = np.random.default_rng(seed)
    kinds = ["long", "short"] * count
    random.shuffle(kinds)
    found, at_s = [], 0.0
    for kind in kinds:
        at_s += random.uniform(0.5, 1.5) * INTERVAL_S / 2
        is_long = kind == "long"
        length = int(random.integers(*LONG, endpoint=True)) if is_long else SHORT
        prompt = random.integers(0, NUM_WORDS, length).tolist()
        found.append(Arrival(at_s, kind, prompt, LONG_TOKENS if is_long else SHORT_TOKENS))
    return found


class Load:
    """Sends requests, and records when their tokens arrive."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._client = engine.client
        self._name = f"{time.monotonic_ns()}"
        self._events: queue.SimpleQueue[tuple[int, float, RequestDelta]] = queue.SimpleQueue()
        self._sent: list[tuple[str, float]] = []  # each request's kind, and when it was sent
        self._token_s: list[list[float]] = []  # when each request's tokens arrived
        self._num_open = 0

    def send(self, kind: str, prompt: list[int], max_tokens: int) -> None:
        number = len(self._sent)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._sent.append((kind, time.perf_counter()))
        self._token_s.append([])
        self._num_open += 1
        name, note = f"{self._name}-{number}", partial(self._note, number)
        self._client.submit(name, prompt, params, [], note)

    def _note(self, number: int, delta: RequestDelta) -> None:
        self._events.put((number, time.perf_counter(), delta))

    def wait(self, until: Callable[[], bool]) -> None:
        """Receive tokens until ``until`` returns True.

        Raises:
            EngineDeadError: a request failed, or the engine sent no message for two minutes.
        """
        while not until():
            try:
                number, at_s, delta = self._events.get(timeout=SILENCE_S)
            except queue.Empty:
                raise EngineDeadError(f"no token within {SILENCE_S:g} s") from None
            if delta.finish_reason == "error":
                raise EngineDeadError(delta.error)
            self._token_s[number] += [at_s] * len(delta.tokens)
            self._num_open -= delta.finish_reason is not None

    @property
    def has_ended(self) -> bool:
        return self._num_open == 0

    @property
    def have_begun(self) -> bool:
        return all(len(token_s) >= BEFORE for token_s in self._token_s)

    def times(self) -> Times:
        """Return four lists of times. ``long`` and ``short``: from the sending of a prompt to its
        first token. ``second``: from the first to the second token of a long prompt. ``gap``:
        between two tokens of a stream, while prompts are answered.
        """
        requests = [(*sent, tokens) for sent, tokens in zip(self._sent, self._token_s, strict=True)]
        others = [request for request in requests if request[0] != STREAM]
        begin_s, end_s = min(sent for _, sent, _ in others), max(s[-1] for _, _, s in others)
        gaps = [
            (second - first) * 1e3
            for kind, _, token_s in requests
            for first, second in pairwise(token_s)
            if kind == STREAM and begin_s <= first and second <= end_s
        ]
        found: Times = {"gap": gaps}
        for kind, sent_s, token_s in others:
            found.setdefault(kind, []).append((token_s[0] - sent_s) * 1e3)
        found["second"] = [(s[1] - s[0]) * 1e3 for kind, _, s in others if kind == "long"]
        return found


def run_load(engine: DecodeEngine, streams: int, others: Sequence[Arrival]) -> Times:
    """Let ``streams`` requests decode while the other requests arrive; return the times."""
    load, random = Load(engine), np.random.default_rng(0)
    num_tokens = min(int(others[-1].at_s / STEP_S), MAX_LEN - SHORT)
    for _ in range(streams):
        load.send(STREAM, random.integers(0, NUM_WORDS, SHORT).tolist(), num_tokens)
    load.wait(lambda: load.have_begun)
    begin_s = time.perf_counter()
    for each in others:
        time.sleep(max(0.0, begin_s + each.at_s - time.perf_counter()))
        load.send(each.kind, each.prompt, each.max_tokens)
    load.wait(lambda: load.has_ended)
    return load.times()


def measure(
    folder: Path, bar: Progress, rounds: int, count: int, streams: int
) -> dict[str, dict[str, float]]:
    """Run both deployments in turns.

    Returns:
        for each of the two deployments, percentiles of all times in milliseconds, and the number of
        blocks that were read from files.
    """
    model = replace(
        MODELS[MODEL], config={**MODELS[MODEL].config, "num_key_value_heads": NUM_KV_HEADS}
    )
    kv = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    engines = {
        way: modelled_engine(
            folder,
            bar,
            way,
            model,
            {"mode": "FULL_DECODE_ONLY"},
            MAX_BATCH,
            {
                "parallel": {"dp": NUM_GROUPS, **roles},
                "kv": {**kv, "host_gib": HOST_GIB} if roles else kv,
                "max_model_len": MAX_LEN,
            },
            max_num_batched_tokens=STEP_TOKENS,
            prefix_cache=True,
        )
        for way, roles in WAYS.items()
    }
    found: dict[str, Times] = {way: {} for way in engines}
    task = bar.add_task("with and without roles", total=len(engines) * (rounds + 1))
    with ray_for(list(engines.values())), ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(engine)
        for round_ in range(rounds + 1):
            for way, engine in engines.items():
                for what, times in run_load(engine, streams, arrivals(count, round_)).items():
                    if round_:  # the first round warms up
                        found[way].setdefault(what, []).extend(times)
                bar.advance(task)
        num_read = {way: _num_read(engine) for way, engine in engines.items()}
    return {
        way: {
            **{
                f"{what}_{p}": percentile(ms, p) for what, ms in times.items() for p in (50, 90, 99)
            },
            "num_read": num_read[way],
        }
        for way, times in found.items()
    }


def _num_read(engine: DecodeEngine) -> int:
    counts = engine.client.query("metrics", SILENCE_S).values()
    return sum(each["kv_copied_blocks"].get("loaded", 0) for each in counts)


def table(found: dict[str, dict[str, float]]) -> Table:
    """Return a line for each of ``FIGURES``. A cell contains a deployment's value, and the ratio of
    this value to the value of the first deployment.
    """
    lines = [
        [words, *(f"{row[key]:.1f} ({row[key] / found[ALL][key]:.2f})" for row in found.values())]
        for words, key in FIGURES.items()
    ]
    return Table("Times in ms (ratio to groups that do everything)", ["", *found], lines)


def main(
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 4,
    prompts: Annotated[int, typer.Option(help="Long prompts of a round, and short ones.")] = 10,
    streams: Annotated[int, typer.Option(help="Requests that decode.")] = STREAMS,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""

    def run(folder: Path, bar: Progress) -> dict[str, Any]:
        return {"roles": measure(folder, bar, rounds, prompts, streams), "note": NOTE}

    def report(results: dict[str, Any]) -> Report:
        return Report("With and without a prefill group", [table(results["roles"])])

    report_bench("roles", out, run, report)


if __name__ == "__main__":
    run_command(main)
