"""The loop of one simulated lockstep group. The scheduler, the dispatcher and the rules for graph
changes are the same as in a real engine.

Three things differ from a real engine: each step takes an assumed time, captures always succeed,
and the generated tokens are meaningless.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dist_aclgraph.actors.capture.graph_changes import GraphChanges
from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.arrays.ints import INT_BYTES, IntArray, pack_ints
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import make_checkpoints
from dist_aclgraph.kv.look_ups import LookUps
from dist_aclgraph.planning.budget import BucketProbe, StreamOffer, reserved_streams, total
from dist_aclgraph.planning.commands import GraphAction, GraphAnswer
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.lazy import LazyGraphs
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan
from dist_aclgraph.planning.planner import NegotiatedPlan
from dist_aclgraph.planning.traffic import Traffic, TrafficHistory
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.simulate.copy_rates import CopyRates
from dist_aclgraph.simulate.deployment import AssumedDeployment, distinct
from dist_aclgraph.simulate.fetches import SimulatedFetches
from dist_aclgraph.simulate.files import SimulatedCopies, SimulatedNode, make_copies
from dist_aclgraph.simulate.latencies import Latencies
from dist_aclgraph.simulate.load import Arrival, Batch
from dist_aclgraph.simulate.streams import streams_held, tightest_offer
from dist_aclgraph.simulate.tally import LastStep, Tally, WatchedDispatcher
from dist_aclgraph.simulate.times import StepTimes
from dist_aclgraph.steps.step import RowSampling, StepPlan, StepResult

IDLE_POLL_S = 0.1  # seconds between captures or releases of graphs, if a group is idle
MAX_VERSIONS = 256  # maximum number of plan versions in the result; the oldest versions are dropped
STEPS_BETWEEN_LOOKS = 512  # number of steps between two calls of ``on_progress``
# ``RankBatch.scheduled`` consists of records. LOGITS is the index of num_logits in a record, and
# RECORD is the number of integers of a record.
LOGITS, RECORD = 3, 4

OnProgress = Callable[[], None]


@dataclass
class SimulatedRanks:
    """The simulated ranks of a group. One answer to a graph action represents the answers of all
    ranks. Every capture succeeds.

    Attributes:
        captures, releases: number of captured graphs, and number of released graphs.
    """

    plan: GraphPlan
    ranks: tuple[int, ...] = (0,)
    captures: int = 0
    releases: int = 0

    def carry_out(
        self,
        action: GraphAction,
        timeout_s: float,
        graph: BatchDescriptor | None = None,
        plan: GraphPlan | None = None,
    ) -> list[GraphAnswer]:
        if plan is not None:
            self.plan = plan
        self.captures += action == "capture"
        self.releases += action == "release"
        return [GraphAnswer(0, 0, 0, plan_hash=self.plan.hash, cost=CaptureCost())]


@dataclass
class Counts:
    """Numbers of events in a simulated group. Steps are counted by ``Tally``."""

    generated_tokens: int = 0
    finished: int = 0
    # Maps the name of an error class to the number of requests that were refused with this error.
    refused: Counter[str] = field(default_factory=Counter)
    lazy_captures: int = 0
    lazy_evictions: int = 0
    plan_captures: int = 0
    plan_changes: int = 0
    most_waiting: int = 0


class SimulatedGroup:
    """One lockstep group and its clock.

    Args:
        shares_plan_with: number of groups that share one plan and change it together, including
            this group. The other groups are assumed to have the same traffic as this group.
        accepted: probability that a draft is accepted, if all drafts before it were accepted.
        seed: seed of the random numbers that decide whether drafts are accepted.
        node: the files of the node on which the group runs; None if no copies of KV are kept.
        rates: the rates at which KV is copied.
    """

    def __init__(
        self,
        deployment: AssumedDeployment,
        negotiated: NegotiatedPlan,
        num_blocks: int,
        times: StepTimes,
        *,
        shares_plan_with: int = 1,
        accepted: float = 0.0,
        seed: int = 0,
        node: SimulatedNode | None = None,
        rates: CopyRates | None = None,
    ) -> None:
        config = deployment.config
        self._deployment = deployment
        self._times = times
        self._offers = _probed(deployment, distinct(negotiated.offers))
        self._weight = shares_plan_with
        self._history = TrafficHistory(config.graph, 0.0)
        self._is_unseen = False  # whether a step has run since buckets were last chosen
        self.clock_s = 0.0
        self.tally = Tally()
        self.counts = Counts()
        self.latencies = Latencies()
        self.lazy_capacity = negotiated.lazy_capacity
        self.reserve = reserved_streams(config)
        self.tightest = tightest_offer(deployment, negotiated)
        lazy = LazyGraphs.from_config(config, negotiated.lazy_capacity)
        self.dispatcher = WatchedDispatcher(negotiated.plan, lazy)
        self.versions: deque[dict[str, Any]] = deque(maxlen=MAX_VERSIONS)
        self._note_version()
        self._streams_of = streams_held(deployment, self.tightest)
        self.most_streams = self._streams_of(self.dispatcher.graphs)
        self.ranks = SimulatedRanks(negotiated.plan)
        self.changes = GraphChanges(
            self.dispatcher,
            GraphTransaction(self.ranks, vote_s=math.inf, work_s=math.inf),
            dict.fromkeys(negotiated.plan.capture_order, CaptureCost()),
        )
        self.scheduler = Scheduler(
            config.scheduler,
            [
                BlockPool(
                    num_blocks,
                    Shards.from_config(config).tokens_per_block,
                    prefix_cache=config.shares_prefixes,
                    checkpoints=make_checkpoints(
                        config, has_state=deployment.facts.linear is not None
                    ),
                )
                for _ in range(deployment.layout.within_group.dp)
            ],
            self.dispatcher,
            max_model_len=deployment.planner.max_model_len,
            num_drafts=config.speculative.num_tokens,
            tp=deployment.layout.tp,
            pcp=deployment.layout.pcp,
            choose_exchange=deployment.exchange.choose,
            exact=config.recovery.exact,
            look_ups=None if node is None else LookUps(node.files, lambda: self.clock_s),
        )
        self.node = node
        self.copies: SimulatedCopies | None = None
        self.fetches: SimulatedFetches | None = None
        if node is not None:
            rates = rates or CopyRates()
            self.copies = make_copies(self.scheduler, deployment, node, rates)
            block_s = deployment.bytes_of_files / rates.network
            self.fetches = SimulatedFetches(node, block_s, lambda: self.clock_s)
        # Requests whose prompt was computed for another group, and that still have blocks to be
        # written to files.
        self._handing_over: list[Request] = []
        self._ranks_per_batch = deployment.layout.tp * deployment.layout.pcp
        self._flying: deque[tuple[StepPlan, LastStep]] = deque()  # steps in flight, oldest first
        self._num_drafts = config.speculative.num_tokens
        self._accepted, self._random = accepted, np.random.default_rng(seed)
        most_tokens = config.scheduler.max_num_seqs * (self._num_drafts + 1)
        self._no_tokens = bytes(INT_BYTES * most_tokens)

    # ---- loads

    def play_batches(
        self, batches: Iterator[Batch], max_seconds: float, on_progress: OnProgress
    ) -> None:
        """Dispatch batches one after another, as if the scheduler had decided them."""
        for batch in batches:
            if self.clock_s >= max_seconds:
                return
            self._look_again()
            if self.changes.is_due(is_idle=False, is_quiet=True):
                self._change_graphs()
            self.dispatcher.dispatch(*batch)
            self._end_step(self.dispatcher.last, on_progress)

    def play_requests(self, arrivals: Iterator[Arrival], on_progress: OnProgress) -> None:
        """Serve requests until all are finished."""
        for coming in arrivals:
            for _ in self.play_until(coming.arrival_s, on_progress):
                pass
            number = self.counts.finished + self.scheduler.num_requests
            self.submit(str(number + self.counts.refused.total()), coming)
        for _ in self.play_until(math.inf, on_progress):
            pass

    @property
    def is_busy(self) -> bool:
        """Whether the group has unfinished requests, or requests that wait until they can be handed
        over to another group.
        """
        return self.scheduler.has_work or bool(self._handing_over)

    def take_handed_over(self) -> list[Request]:
        """Remove and return the requests that can be handed over now. No block of these requests
        waits to be written to a file.
        """
        is_ready = self.scheduler.copies.have_ended
        ready = [request for request in self._handing_over if is_ready(request)]
        self._handing_over = [each for each in self._handing_over if each not in ready]
        return ready

    def play_until(self, until_s: float, on_progress: OnProgress) -> Iterator[StepOutputs]:
        """Advance the clock to ``until_s``, and yield the outputs of each step. Also yield empty
        outputs if copy jobs begin or end while no step runs.

        If ``until_s`` is infinite, stop when all work is done.
        """
        scheduler, flying = self.scheduler, self._flying
        while self.clock_s < until_s:
            self._look_again()
            is_due = self.changes.is_due(not scheduler.has_work, not scheduler.waiting.queue)
            is_changed = is_due and not flying and self._change_graphs()
            plan = None if is_due and flying else scheduler.schedule()
            if plan is not None:
                flying.append((plan, self.dispatcher.last))
            has_changed = False
            if self.copies is not None:
                has_changed = self.copies.advance(self.clock_s, is_idle=not flying)
            if self.fetches is not None:
                has_changed |= self.fetches.advance(self.clock_s)
            if plan is not None and len(flying) < scheduler.config.steps_in_flight:
                continue
            if flying:
                yield self._run(*flying.popleft(), on_progress)
            elif has_changed:
                yield StepOutputs()
            elif (end_s := self._next_end_s) < until_s:
                self.clock_s = max(self.clock_s, end_s)
            elif until_s == math.inf:
                assert not scheduler.has_work, "requests wait, and none can ever run"
                return
            else:
                self._wait(until_s, is_changed)

    @property
    def _next_end_s(self) -> float:
        """The time at which the next copy job or fetch ends; infinite if none runs."""
        running = (each for each in (self.copies, self.fetches) if each is not None)
        return min((each.next_end_s for each in running), default=math.inf)

    def submit(
        self,
        name: str,
        arrival: Arrival,
        *,
        hands_over: bool = False,
        output: Sequence[int] = (),
        source: SimulatedNode | None = None,
    ) -> bool:
        """Submit a request. Return whether the scheduler accepted the request.

        Args:
            name: the request's id, which is a number as text.
            hands_over: whether the group computes only the prompt and the first token.
            output: the tokens that another group has already generated.
            source: the node of the group that has computed the prompt; None if this group computes
                the prompt.
        """
        prompt = arrival.token_ids(int(name))
        request = Request(
            name,
            [*prompt, *output],
            RowSampling(num_prompt_tokens=len(prompt)),
            max_tokens=1 if hands_over else arrival.output_tokens - len(output),
            hands_over=hands_over,
        )
        if self.fetches is not None and source not in (None, self.node):
            request.fetch = partial(self.fetches.begin, source)
        try:
            self.scheduler.add(request)
        except DistAclGraphError as e:
            self.counts.refused[type(e).__name__] += 1
            return False
        if not output:
            self.latencies.note_arrival(name, arrival.arrival_s)
        self.counts.most_waiting = max(self.counts.most_waiting, len(self.scheduler.waiting.queue))
        return True

    def _run(self, plan: StepPlan, step: LastStep, on_progress: OnProgress) -> StepOutputs:
        """Run a step that was decided before. Return its outputs.

        Args:
            step: the arguments and the result of the dispatcher's call for this step.
        """
        results = []
        for dp_rank, batch in enumerate(plan.batches):
            logits = np.frombuffer(batch.scheduled, dtype="<i4")[LOGITS::RECORD]
            counts = self._num_tokens_of(logits[logits > 0])
            tokens = self._no_tokens[: INT_BYTES * int(counts.sum())]
            owner = dp_rank * self._ranks_per_batch
            packed = pack_ints(counts) if self._num_drafts else b""
            results.append(StepResult(plan.epoch, plan.step, owner, tokens, packed))
        self._end_step(step, on_progress)
        outputs = self.scheduler.update(results)
        self.latencies.note_outputs(self.clock_s, outputs)
        self.counts.generated_tokens += outputs.num_tokens
        ended = [outputs.requests[index] for index in outputs.finish_reasons]
        self.counts.finished += len(ended)
        self._handing_over += (request for request in ended if request.hands_over)
        return outputs

    def _num_tokens_of(self, num_logits: IntArray) -> IntArray:
        """Return, for each sampled request, the number of its new tokens: one plus the number of
        its accepted drafts.

        Args:
            num_logits: [num_samples], for each request: one plus the number of its verified drafts.
        """
        if not self._num_drafts:
            return num_logits
        shape = len(num_logits), self._num_drafts
        is_right = self._random.random(shape) < self._accepted
        accepted = np.cumprod(is_right, axis=1).sum(axis=1)
        counts: IntArray = np.minimum(1 + accepted, num_logits).astype(np.int32)
        return counts

    def _end_step(self, step: LastStep, on_progress: OnProgress) -> None:
        """Count a step, and advance the clock by the time that the step takes."""
        self.tally.add(self.clock_s, step)
        graph = step.graph
        if graph is None:
            self.clock_s += self._times.step_s(step.num_tokens, "NONE")
        else:
            self.clock_s += self._times.step_s(graph.num_tokens, graph.mode)
        self._is_unseen = True
        if self.dispatcher.step % STEPS_BETWEEN_LOOKS == 0:
            on_progress()

    def _wait(self, until_s: float, is_changed: bool) -> None:
        """Advance the clock of an idle group to the next event."""
        if is_changed or self.changes.is_changing:
            until_s = min(until_s, self.clock_s + IDLE_POLL_S)
        elif self._is_unseen:
            until_s = min(until_s, max(self.clock_s, self._history.next_look_s))
        self.clock_s = until_s

    # ---- graphs

    def _change_graphs(self) -> bool:
        """Do the captures and releases that are due. Return whether a graph was captured or
        released.
        """
        ranks, counts = self.ranks, self.counts
        is_planned, version = self.changes.is_changing, self.dispatcher.plan.version
        captures, releases = ranks.captures, ranks.releases
        self.changes.advance()
        captures, releases = ranks.captures - captures, ranks.releases - releases
        self.clock_s += captures * self._times.capture_s
        if is_planned:
            counts.plan_captures += captures
        else:
            counts.lazy_captures += captures
            counts.lazy_evictions += releases
        if self.dispatcher.plan.version != version:
            counts.plan_changes += 1
            self._note_version()
        if captures or releases:
            held = self._streams_of(self.dispatcher.graphs)
            self.most_streams = max(held, self.most_streams, key=lambda found: found["all"])
        return bool(captures or releases)

    def _look_again(self) -> None:
        """Choose the buckets again if a new choice is due, as the controller does."""
        if not self._history.is_due(self.clock_s):
            return
        self._is_unseen = False
        seen = _times(self.dispatcher.take_traffic(), self._weight)
        traffic = self._history.record([seen], self.clock_s)
        if self.changes.is_changing:
            return
        change = self._deployment.planner.choose_again(
            self.dispatcher.plan,
            traffic,
            self._offers,
            {g: self._times.step_s(g.num_tokens, g.mode) for g in self.dispatcher.replays},
        )
        if change is not None:
            self.changes.change_plan(*change)

    def _note_version(self) -> None:
        plan = self.dispatcher.plan
        self.versions.append(
            {
                "at_s": self.clock_s,
                "step": self.dispatcher.step,
                "version": plan.version,
                "families": {family.name: list(family.buckets) for family in plan.families},
                "reason": plan.reasons[-1] if plan.reasons else "",
            }
        )


def _probed(deployment: AssumedDeployment, offers: list[StreamOffer]) -> list[StreamOffer]:
    """Add probes to the offers: the costs that real ranks would measure for the calibrated budget
    model.

    With probes, buckets are later chosen by the times of steps. Without probes, buckets are chosen
    by the numbers of tokens.
    """
    config, model = deployment.config, deployment.budget_model
    if model.name != "calibrated":
        return offers
    graphs = {
        family.describe(family.buckets[-1], config.scheduler.max_num_seqs): family
        for family in deployment.planner.families
    }
    return [
        msgspec.structs.replace(
            offer,
            probes=tuple(
                BucketProbe(
                    graph=graph,
                    streams=total(model.price(family, offer)),
                    bytes=0,
                )
                for graph, family in graphs.items()
            ),
        )
        for offer in offers
    ]


def _times(traffic: Traffic, count: int) -> Traffic:
    """Return the total traffic of ``count`` groups that all have this traffic."""
    return Traffic(
        decode={tokens: weight * count for tokens, weight in traffic.decode.items()},
        mixed={tokens: weight * count for tokens, weight in traffic.mixed.items()},
    )
