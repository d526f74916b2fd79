"""The controller actor: brings a deployment from configuration to serving, and to its end.

A deployment's way: PLACING, JOINING, LOADING, NEGOTIATING, CAPTURING, SERVING, DRAINING, STOPPED
(``state.py``). Each phase has a deadline; an error names the rank and the phase, and takes the
whole deployment down in order.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.engine import Engine, EngineSettings
from dist_aclgraph.actors.graph_transaction import GraphTransaction
from dist_aclgraph.actors.lockstep_capture import (
    CaptureRecord,
    agree,
    capture_plan,
    probe_graphs,
)
from dist_aclgraph.actors.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.processes import leave_with_parent
from dist_aclgraph.actors.state import State, advance
from dist_aclgraph.actors.traffic_watch import TrafficWatch
from dist_aclgraph.actors.worker_group import WorkerGroup, fetch, same, start_group
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, DistAclGraphError, WorkerError
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.planning.buckets import GraphFamily, candidate_families, lazy_families
from dist_aclgraph.planning.budget import Workload, make_budget_model
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.ledger import Ledger, pool_bytes
from dist_aclgraph.planning.modes import with_possible_mode
from dist_aclgraph.planning.negotiation import fit_memory, keep_room, negotiate
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.shapes.model_facts import check_model, read_model_facts
from dist_aclgraph.topology import ParallelLayout

logger = logging.getLogger(__name__)

EPOCH = 1  # of a deployment that does not yet survive the death of a worker
WATCH_S = 0.2
MIB = 1 << 20
TRIAL_BLOCKS = 2  # a cache for padding rows alone: they use the dummy block


@dataclass(frozen=True)
class Progress:
    """What people are shown while a deployment starts."""

    state: str
    done: int = 0
    total: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Service:
    """Where a serving deployment is reached."""

    addresses: list[str]
    token: str
    max_model_len: int


class Controller:
    """Owns the plan, the states, and all actors of a deployment."""

    def __init__(self, config: Config, *, is_emulated: bool) -> None:
        leave_with_parent()
        self._config = config
        self._is_emulated = is_emulated
        self._state = State.PLACING
        self._progress = Progress(self._state.value)
        self._failure = ""
        self._mode_reasons: tuple[str, ...] = ()
        self._groups: list[LockstepGroup] = []
        self._traffic_watch: list[TrafficWatch] = []
        self._token = secrets.token_hex(16)
        self._started_s = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)

    # ---- answered while start() runs

    def progress(self) -> Progress:
        if self._state is State.LOADING:
            reports = [p for group in self._groups for p in group.workers.progress()]
            done = min((r["progress"][0] for r in reports), default=0)
            total = max((r["progress"][1] for r in reports), default=0)
            return Progress(self._state.value, done, total, "layers")
        return self._progress

    def check(self) -> str:
        """Return why the deployment serves no more, or "" while all is well."""
        return self._failure

    def report(self) -> dict[str, Any]:
        """Return what is known of the plan, the ranks and every engine's counters."""
        reports = [
            ray.get(group.engine.report.remote(), timeout=10.0)
            for group in self._groups
            if group.engine is not None
        ]
        merged = dict(reports[0]) if reports else self._group_report(0)
        merged["state"] = self._state.value
        merged["failure"] = self._failure
        merged["groups"] = reports[1:]
        return merged

    # ---- from configuration to serving

    def start(self) -> Service:
        """Run all phases.

        Raises:
            DistAclGraphError: the first error; everything that was started is stopped by then.
        """
        try:
            self._read_model()
            self._place()
            self._join()
            self._load()
            self._negotiate_and_capture()
            return self._serve()
        except Exception as e:
            self._failure = str(e)
            self._stop_actors()
            self._enter(State.STOPPED)
            if isinstance(e, DistAclGraphError):
                raise
            raise WorkerError(f"{type(e).__name__}: {e}", phase=self._state.value) from e

    def _enter(self, state: State) -> None:
        self._state = advance(self._state, state)
        self._progress = Progress(state.value)

    def _read_model(self) -> None:
        """Learn what planning must know of the checkpoint.

        Raises:
            ModelError, ConfigError: it cannot be served, or not so.
        """
        self._facts = read_model_facts(self._config.model)
        check_model(self._config, self._facts)
        config, self._mode_reasons = with_possible_mode(self._config, self._facts)
        self._config = config
        for reason in self._mode_reasons:
            logger.warning(reason)
        self._layout = ParallelLayout.from_config(config.parallel)
        self._max_model_len = config.max_model_len or self._facts.max_model_len
        if self._max_model_len > self._facts.max_model_len:
            raise ConfigError(
                f"max_model_len is {self._max_model_len}; the model's context is "
                f"{self._facts.max_model_len} tokens"
            )
        self._cache_spec = KVCacheSpec.from_config(config, self._facts)
        workload = Workload.from_config(config, self._facts)
        self._budget_model = make_budget_model(config.graph.budget_model, workload)

    def _place(self) -> None:
        for ranks in self._layout.lockstep_groups:
            workers = start_group(self._config, ranks, EPOCH, is_emulated=self._is_emulated)
            self._groups.append(LockstepGroup(workers))

    def _join(self) -> None:
        self._enter(State.JOINING)
        timeout_s = self._config.timeouts.join_s
        for group in self._groups:
            workers = group.workers
            one_node = len({info.node_id for info in workers.infos}) == 1
            leader = workers.infos[0]
            # Beside the first worker: its node is the one that ranks meet at.
            group.engine = _beside(leader.node_id).remote(
                self._config, len(workers.ranks), one_node=one_node, host=leader.node_ip
            )
            rendezvous = ray.get(group.engine.rendezvous.remote(), timeout=timeout_s)
            devices = workers.call(
                "join",
                "JOINING",
                timeout_s,
                _places(workers, rendezvous),
            )
            group.device = devices[0]

    def _load(self) -> None:
        self._enter(State.LOADING)
        for group in self._groups:
            loaded = group.workers.call("load", "LOADING", self._config.timeouts.load_s)
            group.weight_bytes = max(loaded)

    # ---- the plan

    def _negotiate_and_capture(self) -> None:
        self._enter(State.NEGOTIATING)
        families = candidate_families(self._config)
        self._lazy_families = lazy_families(self._config)
        for group in self._groups:
            self._make_runners(group, families)
            self._ask_offers(group, families)
        scopes = [self._groups]
        if self._config.graph.scope == "group":
            scopes = [[group] for group in self._groups]
        for groups in scopes:
            self._plan_groups(groups, families)
        self._traffic_watch = [
            TrafficWatch(self._config, groups, families, self._budget_model) for groups in scopes
        ]

    def _make_runners(self, group: LockstepGroup, families: tuple[GraphFamily, ...]) -> None:
        """Have every rank make a runner that can try things out: its cache holds dummies only."""
        timeout_s = self._config.timeouts.negotiate_s
        query_len = self._config.speculative.num_tokens + 1
        # Run eagerly where no graph is captured.
        smallest = BatchDescriptor(query_len, 1, query_len, "FULL")
        largest = self._largest([*families, *self._lazy_families]) or [smallest]
        # The cache write of latent attention wants a slot for each row, padding or not.
        rows = max((graph.num_tokens for graph in largest if graph.query_len), default=0)
        num_blocks = max(TRIAL_BLOCKS, self._cache_spec.blocks_for(rows))
        group.workers.call(
            "make_runner",
            "NEGOTIATING",
            timeout_s,
            same(num_blocks, self._max_model_len, largest),
        )
        # An eager step of each kind creates HCCL domains and side streams: offers count them.
        for graph in largest:
            for answer in group.workers.carry_out("prepare", timeout_s, graph):
                if answer.failure is not None:
                    raise WorkerError(answer.message, answer.rank, "NEGOTIATING")

    def _ask_offers(self, group: LockstepGroup, families: tuple[GraphFamily, ...]) -> None:
        """Collect the offers, and probes for them where the budget model wants some."""
        timeout_s = self._config.timeouts.negotiate_s
        group.offers = group.workers.call("offer", "NEGOTIATING", timeout_s)
        if self._config.graph.budget_model == "calibrated":
            largest = self._largest([*families, *self._lazy_families])
            group.offers = probe_graphs(self._transaction(group), largest, group.offers)

    def _largest(self, families: Sequence[GraphFamily]) -> list[BatchDescriptor]:
        """The largest graph of each kind; of equal kinds, of the one that comes first."""
        max_num_seqs = self._config.scheduler.max_num_seqs
        return list(
            dict.fromkeys(family.describe(family.buckets[-1], max_num_seqs) for family in families)
        )

    def _plan_groups(self, groups: list[LockstepGroup], families: tuple[GraphFamily, ...]) -> None:
        """Negotiate one plan over ``groups``, size the caches with what it leaves, capture it."""
        config, model = self._config, self._budget_model
        self._keep_room_for_lazy_graphs(groups)
        offers = [offer for group in groups for offer in group.offers]
        plan = negotiate(
            offers,
            families,
            model,
            traffic=Traffic.from_config(config.graph),
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        if plan.families and self._state is State.NEGOTIATING:
            self._enter(State.CAPTURING)
            for group in self._groups:
                group.workers.phase = self._state.value
        # What has no room now is not kept room for: it would leave none for the cache.
        lazy, _ = fit_memory(self._lazy_families if plan.families else (), offers, model)
        everything = msgspec.structs.replace(plan, families=(*plan.families, *lazy))
        for group in groups:
            group.num_blocks = self._cache_spec.choose_num_blocks(
                config,
                min(o.free_bytes - pool_bytes(everything, o, model) for o in group.offers),
                self._max_model_len,
            )
            group.workers.call(
                "make_cache", self._state.value, config.timeouts.negotiate_s, same(group.num_blocks)
            )
            group.ledgers = [Ledger.predict(o, plan, model) for o in group.offers]
            group.record = self._capture(group, plan)

        def capture_again(index: int, plan: GraphPlan) -> CaptureRecord:
            group = groups[index]
            group.record = self._capture(group, plan)
            return group.record

        agree([_record_of(group) for group in groups], capture_again)

    def _keep_room_for_lazy_graphs(self, groups: list[LockstepGroup]) -> None:
        """Take the streams of lazy graphs out of the offers: as many as every rank can spare."""
        kept, capacity = keep_room(
            [offer for group in groups for offer in group.offers],
            self._lazy_families,
            self._config.graph.lazy_capacity,
            self._budget_model,
        )
        by_rank = {offer.rank: offer for offer in kept}
        for group in groups:
            group.lazy_capacity = capacity
            group.offers = [by_rank[offer.rank] for offer in group.offers]

    def _capture(self, group: LockstepGroup, plan: GraphPlan) -> CaptureRecord:
        transaction = self._transaction(group)
        if group.record is not None:  # captured before, with another plan
            transaction.release(group.record.plan.capture_order)

        def show(record: CaptureRecord, graph: BatchDescriptor | None) -> None:
            done, total = len(record.costs), record.plan.num_graphs
            left = min(offer.available for offer in group.offers)
            detail = _progress_of(record, graph, left)
            self._progress = Progress(self._state.value, done, total, detail)

        record = capture_plan(transaction, plan, group.ledgers, show)
        timeout_s = self._config.timeouts.negotiate_s
        held = group.workers.call("pool_bytes", self._state.value, timeout_s)
        group.pool_bytes = max(held)
        for ledger, count in zip(group.ledgers, held, strict=True):
            ledger.measure("graph pool", count, "bytes")
        return record

    def _transaction(self, group: LockstepGroup) -> GraphTransaction:
        timeouts = self._config.timeouts
        return GraphTransaction(group.workers, timeouts.negotiate_s, timeouts.capture_s)

    # ---- serving

    def _serve(self) -> Service:
        addresses = []
        for index, group in enumerate(self._groups):
            address = ray.get(group.engine.channel_address.remote(), timeout=10.0)
            group.loops = group.workers.start_loops(address)
            settings = EngineSettings(
                epoch=EPOCH,
                num_blocks=group.num_blocks,
                max_model_len=self._max_model_len,
                plan=_plan_of(group),
                costs=_record_of(group).costs,
                lazy_capacity=group.lazy_capacity,
                exchange=ExchangeRule.from_config(
                    self._config, self._facts, group.offers[0].device
                ),
                token=self._token,
                report=self._group_report(index),
            )
            serving = group.engine.serve.remote(settings)
            # A worker that dies on its way into the loop must not leave us waiting.
            self._wait_or_lose(group, serving)
            addresses.append(ray.get(serving))
        self._enter(State.SERVING)
        self._watcher.start()
        num_blocks = min(group.num_blocks for group in self._groups)
        longest = self._cache_spec.longest_request(num_blocks, self._max_model_len)
        return Service(addresses, self._token, longest)

    def _wait_or_lose(self, group: LockstepGroup, serving: Any) -> None:
        timeout_s = self._config.timeouts.join_s
        ready, _ = ray.wait([serving, *group.loops], num_returns=1, timeout=timeout_s)
        if not ready:
            raise WorkerError(f"no step loop within {timeout_s:g} s", phase=self._state.value)
        if ready[0] is not serving and ready[0] != serving:
            fetch(ready[0], group.workers.ranks[group.loops.index(ready[0])], "CAPTURING")

    def _watch(self) -> None:
        """Turn the first death into the deployment's failure."""
        owner_of = {
            loop: (group, rank)
            for group in self._groups
            for loop, rank in zip(group.loops, group.workers.ranks, strict=True)
        }
        while self._state is State.SERVING:
            ready, _ = ray.wait(list(owner_of), num_returns=1, timeout=WATCH_S)
            if self._state is not State.SERVING:
                return
            if ready:
                group, rank = owner_of[ready[0]]
                try:
                    fetch(ready[0], rank, "SERVING")
                    reason = f"rank {rank} left its step loop"
                except DistAclGraphError as e:
                    reason = str(e)
                self._lose(group, reason)
                return
            for group in self._groups:
                try:
                    reason = ray.get(group.engine.failure.remote(), timeout=10.0)
                except RayError as e:
                    reason = f"the engine is gone: {type(e).__name__}"
                if reason:
                    self._lose(group, reason)
                    return
            for rebucketing in self._traffic_watch:
                try:
                    rebucketing.look(time.monotonic())
                except Exception:  # whatever it is: the watch over lives goes on
                    logger.exception("choosing buckets again failed")

    def _lose(self, group: LockstepGroup, reason: str) -> None:
        """End the epoch of a group: its requests get the reason, its workers are killed."""
        self._failure = reason
        group.engine.fail.remote(reason)
        group.workers.kill()

    # ---- the end

    def shut_down(self) -> None:
        """Stop in order: engines say goodbye, workers leave, what is left is killed."""
        if self._state is State.SERVING:
            self._enter(State.DRAINING)
        self._stop_actors()
        if self._state is not State.STOPPED:
            self._enter(State.STOPPED)

    def _stop_actors(self) -> None:
        timeout_s = self._config.timeouts.stop_s
        for group in self._groups:
            if group.engine is not None:
                stopping = [group.engine.stop.remote()]
                ray.wait([*stopping, *group.loops], num_returns=1 + len(group.loops),
                         timeout=timeout_s)  # fmt: skip
                ray.kill(group.engine)
            group.workers.kill()

    def _group_report(self, index: int) -> dict[str, Any]:
        if index >= len(self._groups):
            return {}
        return {
            **group_report(self._groups[index]),
            "emulated": self._is_emulated,
            "block_size": self._config.kv.block_size,
            "max_model_len": self._max_model_len,
            "mode_reasons": list(self._mode_reasons),
            "ready_seconds": time.monotonic() - self._started_s,
        }


def _progress_of(record: CaptureRecord, graph: BatchDescriptor | None, available: int) -> str:
    """What is captured next, and what the graphs before it have left on the tightest rank."""
    left = available - sum(cost.streams for cost in record.costs.values())
    held = sum(cost.bytes for cost in record.costs.values())
    return f"{graph or 'done'}; {left} streams left, {held / MIB:.1f} MiB taken"


def _record_of(group: LockstepGroup) -> CaptureRecord:
    assert group.record is not None
    return group.record


def _plan_of(group: LockstepGroup) -> GraphPlan:
    return _record_of(group).plan


def _beside(node_id: str) -> Any:
    """Return the engine actor's class, pinned to a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(Engine)
    return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


def _places(workers: WorkerGroup, rendezvous: str) -> Callable[[int], tuple[Any, ...]]:
    """Arguments of ``Worker.join``: world rank, place in the group, and where the group meets."""
    size = len(workers.ranks)
    return lambda index: (workers.ranks[index], index, size, rendezvous)
