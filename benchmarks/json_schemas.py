"""Compiles the schemas of JSONSchemaBench, and checks the values that belong to the schemas.

The data is not in this repository: clone guidance-ai/jsonschemabench, and pass a folder of its
``maskbench/data``. Each file contains a schema, and values that are marked as valid or invalid. The
script starts the compiler's process like the service. The matchers have the limits that workers
set. The vocabulary has 151,936 artificial tokens. Times are CPU times.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import llguidance
import llguidance.numpy
import numpy as np
import typer

from benchmarks.common.command import report_bench, run_command
from benchmarks.common.report import Report, Table
from benchmarks.structured import VOCAB, write_tokenizer
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.sampling import StructuredOutputs
from dist_aclgraph.text.grammars import make_limits, open_tokenizer, vocabulary_of
from dist_aclgraph.text.structure import GrammarCompiler
from dist_aclgraph.text.tokenizer import Tokenizer


def main(
    data: Annotated[Path, typer.Argument(help="Folder with files of JSONSchemaBench.")],
    number: Annotated[int, typer.Option(help="Files that are used, chosen at random.")] = 400,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    files = sorted(data.glob("*.json"))
    random.Random(1).shuffle(files)
    report_bench("json-schemas", out, lambda folder, _: measure(folder, files[:number]), report)


def measure(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Return how many times each verdict occurred, and percentiles of times in microseconds."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 0}))
    write_tokenizer(folder)
    tokenizer = Tokenizer(folder)
    compiler = GrammarCompiler(tokenizer)
    prepared, limits = open_tokenizer(vocabulary_of(tokenizer)), make_limits()
    counts: Counter[str] = Counter()
    compiled: list[float] = []
    masks: list[float] = []
    for path in files:
        case = json.loads(path.read_text())
        try:
            found = compiler.compile(StructuredOutputs(json=json.dumps(case["schema"])))
        except InvalidParameterError:
            counts["refused schemas"] += 1
            continue
        counts["slow schemas"] += found.is_slow
        begin_s = time.thread_time()
        matcher = llguidance.LLMatcher(prepared, found.grammar, log_level=0, limits=limits)
        compiled.append((time.thread_time() - begin_s) * 1e6)
        verdicts = Counter(
            (bool(test["valid"]), _accepts(tokenizer, matcher.deep_copy(), test["data"], masks))
            for test in case["tests"]
        )
        counts["valid values refused"] += verdicts[True, False]
        counts["invalid values accepted"] += verdicts[False, True]
        counts["values"] += verdicts.total()
        counts["schemas with right verdicts"] += not (
            verdicts[True, False] or verdicts[False, True]
        )
    return {
        "note": "CPU times of this machine; the model has no part in them",
        "counts": {"schemas": len(files), **counts},
        **{
            name: [float(np.percentile(times, q)) for q in (50, 99, 100)]
            for name, times in (("compile", compiled), ("mask", masks))
        },
    }


def _accepts(
    tokenizer: Tokenizer, matcher: llguidance.LLMatcher, value: Any, masks: list[float]
) -> bool:
    words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
    text = json.dumps(value, ensure_ascii=False)
    for token in tokenizer.encode(text, add_special_tokens=False):
        begin_s = time.thread_time()
        llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
        masks.append((time.thread_time() - begin_s) * 1e6)
        if not words[0, token // 32] >> (token % 32) & 1 or not matcher.consume_token(token):
            return False
    return matcher.is_accepting()


def report(results: dict[str, Any]) -> Report:
    times = [[name, *(f"{us:.0f}" for us in results[name])] for name in ("compile", "mask")]
    counts = [[name, str(count)] for name, count in results["counts"].items()]
    return Report(
        "JSONSchemaBench",
        [
            Table("Verdicts", ["what", "number"], counts),
            Table("CPU time", ["us", "p50", "p99", "max"], times),
        ],
    )


if __name__ == "__main__":
    run_command(main)
