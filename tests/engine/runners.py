"""A model runner of one rank in this process, and steps for this runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.engine.model_runner import TORCH_DTYPES, ModelRunner
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.int4_formats import read_int4_formats
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.steps.step import (
    RankBatch,
    RankPlan,
    RowSampling,
    RowStart,
    StepResult,
    StepSize,
)
from dist_aclgraph.topology import ExchangeKind
from tests.plans import decode_graph

MAX_LEN, BLOCK_SIZE = 128, 32
GREEDY = RowSampling()
FLOAT32 = {"dtype": "float32"}


def make_runner(
    npu: Npu,
    directory: Path,
    max_tokens: int = 8,
    graphs: Sequence[BatchDescriptor] = (),
    num_drafts: int = 0,
    settings: Mapping[str, Any] = FLOAT32,
    fusions: Fusions | None = None,
    **options: Any,
) -> ModelRunner:
    config = make_config(
        {
            "model": str(directory),
            "scheduler": {"max_num_seqs": max_tokens},
            "kv": {"block_size": BLOCK_SIZE},
            "speculative": {"num_tokens": num_drafts},
            **settings,
        }
    )
    spec = read_model_spec(directory)
    model = Decoder(
        spec,
        ONE_RANK,
        Checkpoint(
            directory,
            TORCH_DTYPES[config.dtype],
            quantises=config.makes_int8,
            names=spec.names,
            int4=read_int4_formats(read_model_config(directory)),
        ),
        device=npu.device,
        max_len=MAX_LEN,
        drafts=num_drafts > 0,
        fusions=fusions or Fusions.decide(config, Chip(npu.name, npu.cann), installed_name()),
        int8_latents=config.kv.dtype == "int8",
    )
    return ModelRunner(
        config,
        npu,
        model,
        num_blocks=64,
        max_len=MAX_LEN,
        graphs=graphs or [decode_graph(max_tokens)],
        owns_output=True,
        **options,
    )


def run_step(runner: ModelRunner, plan: RankPlan, rank: int = 0) -> StepResult:
    """Run one step with no other step in flight, and return its result."""
    results: list[StepResult] = []
    runner.launch(plan, rank, results.append)
    return results[-1] if results else runner.finish()


def turn(scheduler: Scheduler, runner: ModelRunner) -> StepOutputs:
    """Run one turn, as an engine does: launch the next step, and give the oldest result to the
    scheduler.

    Logits must not be NaN or infinite.
    """
    plan, results = scheduler.schedule(), list[StepResult]()
    if plan is not None:
        runner.launch(plan.for_rank(0), 0, results.append)
    elif runner.is_busy:
        results.append(runner.finish())
    assert not any(result.non_finite for result in results), "a request read what nobody wrote"
    return scheduler.update(results)


def size_of(batches: Sequence[RankBatch]) -> StepSize:
    """Return the size of a step that runs ``batches``, each on a different data-parallel rank."""
    records = [unpack_ints(batch.scheduled, 4) for batch in batches]
    return StepSize(
        max(int(each[:, 2].sum()) for each in records),
        max(int((each[:, 3] > 0).sum()) for each in records),
    )


class Sequences:
    """Requests that run in every step. The tests decide the steps; there is no scheduler."""

    # The batches of the other data-parallel ranks, and the way in which ranks exchange tokens with
    # experts.
    beside: tuple[RankBatch, ...] = ()
    exchange: ExchangeKind | None = None

    def __init__(
        self, runner: ModelRunner, prompts: Sequence[list[int]], sampling: Any = None
    ) -> None:
        self._runner = runner
        self._step = 0
        self.tokens = [list(prompt) for prompt in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self._sampling = sampling or [GREEDY] * len(prompts)

    def prefill(self, graph: BatchDescriptor | None = None) -> None:
        rows = range(len(self.tokens))
        records = [x for row in rows for x in (row, 0, len(self.tokens[row]), 1)]
        self.step(graph, records, started=tuple(map(self.start, rows)))

    def start(self, row: int) -> RowStart:
        blocks = range(1 + 4 * row, 5 + 4 * row)
        tokens = self.tokens[row]
        return RowStart(row, pack_ints(tokens), pack_ints(list(blocks)), self._sampling[row])

    def decode(self, graph: BatchDescriptor | None, live: int | None = None) -> None:
        """Run one step of the first ``live`` requests."""
        records, appended = self.decoding(live or len(self.tokens))
        self.step(graph, records, appended=appended)

    def decoding(self, live: int) -> tuple[list[int], bytes]:
        """Return the records and last tokens of a decode step of the first ``live`` requests."""
        rows = range(live)
        appended = [x for row in rows for x in (row, self.tokens[row][-1])]
        records = [x for row in rows for x in (row, len(self.tokens[row]) - 1, 1, 1)]
        return records, pack_ints(appended)

    def idle(self, graph: BatchDescriptor | None, batch: RankBatch) -> StepResult:
        """Run a step without requests, while another data-parallel rank runs ``batch``."""
        self._step += 1
        largest = size_of((batch,))
        plan = RankPlan(1, self._step, 1, graph, 1, RankBatch(b""), self.exchange, largest)
        return run_step(self._runner, plan, 1)

    def step(self, graph: BatchDescriptor | None, records: list[int], **batch: Any) -> StepResult:
        self._step += 1
        own = RankBatch(pack_ints(records), **batch)
        largest = size_of((own, *self.beside))
        plan = RankPlan(1, self._step, 1, graph, 0, own, self.exchange, largest)
        result = run_step(self._runner, plan)
        self._runner.prepare_next(lambda: False)
        sampled = [row for row, sample in zip(records[::4], records[3::4], strict=True) if sample]
        for row, token in zip(sampled, unpack_ints(result.token_ids), strict=True):
            self.tokens[row].append(int(token))
            self.new[row].append(int(token))
        return result
