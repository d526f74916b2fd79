"""The engine actor of one lockstep group. A thread runs the loop; other threads answer the
controller.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import ray

from dist_aclgraph.actors.capture.graph_changes import ChannelRanks, GraphChanges
from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.engine.engine_loop import EngineLoop
from dist_aclgraph.actors.engine.kv_events import KVEvents, publisher_place
from dist_aclgraph.actors.engine.late_decisions import LateDecisions
from dist_aclgraph.actors.engine.resumption import Resumption
from dist_aclgraph.actors.host.liveness import Lease, leave_with, leave_with_raylet
from dist_aclgraph.actors.host.run_directory import SWEEP_S, RunDirectory, sweep
from dist_aclgraph.actors.wire.addresses import Address, Place
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.block_server import (
    BlockServer,
    BlockSource,
    NodeServer,
    source_of,
    tiers_of,
)
from dist_aclgraph.actors.wire.client_links import ClientLinks
from dist_aclgraph.actors.wire.messages import GroupList
from dist_aclgraph.actors.wire.peers import open_server
from dist_aclgraph.actors.wire.step_channel import ChannelAddress, StepSender
from dist_aclgraph.actors.worker.worker_group import ask_workers, stop_devices
from dist_aclgraph.config import Config
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.kv.block_pool import BlockPool
from dist_aclgraph.kv.checkpoints import make_checkpoints
from dist_aclgraph.kv.events import CacheEvents
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.look_ups import LookUps, look_ups_of
from dist_aclgraph.kv.tiers import HostCopies, KVTiers, cache_identity
from dist_aclgraph.logs import ProcessLog, event
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.dispatcher import GraphDispatcher
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.lazy import LazyGraphs
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan
from dist_aclgraph.planning.rebucketing import Action
from dist_aclgraph.planning.restarts import RestartBudget
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.scheduler.scheduler import Scheduler
from dist_aclgraph.topology import GroupRank, ParallelLayout, WorldRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """The settings that the controller sends to a group's engine after the graphs are captured."""

    group: int
    epoch: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    plan: GraphPlan
    costs: dict[BatchDescriptor, CaptureCost]
    lazy_capacity: int
    exchange: ExchangeRule
    counts_shared_blocks: bool
    has_state: bool  # whether the model has recurrent state
    files: GroupFiles | None  # None if no copies of KV are kept
    # the file servers in workers, see ``GroupFiles.servers``
    servers: tuple[NodeServer, ...]
    token: str
    # address at which the engine serves files; None if only processes of its node connect
    files_host: str | None
    report: dict[str, Any]


@dataclass(frozen=True)
class EngineSockets:
    """The addresses of a serving engine.

    Attributes:
        clients: the address for clients.
        blocks: the address from which other groups fetch KV blocks; None if no group fetches
            blocks.
    """

    clients: Address
    blocks: BlockSource | None


@dataclass(frozen=True)
class SeenTraffic:
    """A group's plan (None while the plan changes), its traffic, and the mean step time of each
    graph.
    """

    plan: GraphPlan | None
    traffic: Traffic
    step_seconds: dict[BatchDescriptor, float]


class Engine:
    """Owns the loop, its sockets and their directory.

    The engine starts at the same time as the workers. So the engine gets the handles of the workers
    later, from the call of ``open``.
    """

    def __init__(self, config: Config) -> None:
        leave_with_raylet()
        self._log = ProcessLog("engine")
        self._log.open(config.logging)
        self._config = config
        self._directory = RunDirectory()
        self._next_sweep_s = time.monotonic() + SWEEP_S
        self._world_ranks: tuple[WorldRank, ...] = ()
        self._channel: StepSender | None = None
        self._clients_at: Place | None = None
        self._resumption: Resumption | None = None
        self._loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None
        self._copies: HostCopies | None = None
        self._block_server: BlockServer | None = None
        self._fetches: BlockFetches | None = None
        self._restarts = RestartBudget(config.recovery.restarts_per_hour)
        self._lease = Lease(config.timeouts.link_s)
        leave_with(self._lease, "this engine", self._directory.remove)

    # ---- methods that answer at any time, on the control thread

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def ping(self, number: int) -> None:
        """Respond to the controller's heartbeat question, and renew the engine's lease."""
        self._lease.renew(number)
        if (now_s := time.monotonic()) >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            sweep()  # removes directories of engines that ended after this engine had started

    # ---- from the start of the engine to its end

    def open(
        self,
        world_ranks: Sequence[WorldRank],
        workers: Sequence[Any],
        *,
        node_id: str,
        workers_host: str | None,
        clients_host: str | None,
    ) -> str:
        """Open the step channel; workers may connect from now on.

        Args:
            node_id: Ray's id of this actor's node.
            workers_host: this node's address if workers are on other nodes, too; otherwise None.
            clients_host: this node's address if clients may be on other nodes; otherwise None.

        Returns:
            The URL of a file. The workers form the HCCL groups with this file if all workers are on
            this node.
        """
        place = Place(node_id, self._directory.path, workers_host, self._config.cluster.port_range)
        self._world_ranks = tuple(world_ranks)
        self._clients_at = replace(place, host=clients_host)
        parallel = self._config.parallel
        self._channel = StepSender(
            world_ranks,
            place,
            partial(ask_workers, workers),
            ranks_per_batch=parallel.tp * parallel.pcp,
        )
        stop, resume_s = partial(stop_devices, workers), self._config.recovery.resume_s
        self._resumption = Resumption(self._channel, world_ranks, stop, resume_s)
        return f"file://{self._directory.path}/rendezvous"

    def channel_addresses(self, node_ids: Sequence[str]) -> list[ChannelAddress]:
        """Return, for each rank, the address at which the rank connects to the step channel."""
        assert self._channel is not None
        return [
            self._channel.address_for(node_id, GroupRank(rank))
            for rank, node_id in enumerate(node_ids)
        ]

    def serve(self, settings: EngineSettings) -> EngineSockets:
        """Wait until all workers are connected, and start the loop."""
        assert self._channel is not None and self._clients_at is not None
        assert self._resumption is not None
        began_s = time.time()
        config = self._config
        layout = ParallelLayout.from_config(config.parallel).within_group
        self._channel.wait_for_workers(config.timeouts.join_s, lambda: None)
        dispatcher = GraphDispatcher(
            settings.plan, LazyGraphs.from_config(config, settings.lazy_capacity)
        )
        files = settings.files
        look_ups: LookUps | None = None
        blocks: BlockSource | None = None
        if files is not None:
            place = files.places[0]
            tiers, states = KVTiers.open(config, place), KVTiers.open_states(config, place)
            look_ups = look_ups_of(tiers, states)
            self._copies = HostCopies(config) if config.kv.host_gib else None
            blocks = self._share_blocks(settings, files)
        block_size, events = Shards.from_config(config).tokens_per_block, config.kv.events
        caches = [CacheEvents(block_size, events.encoding) for _ in range(layout.dp)]
        scheduler = Scheduler(
            config.scheduler,
            [
                BlockPool(
                    settings.num_blocks,
                    block_size,
                    prefix_cache=config.shares_prefixes,
                    counts_shared=settings.counts_shared_blocks,
                    checkpoints=make_checkpoints(config, has_state=settings.has_state),
                    events=cache if events.publish else None,
                )
                for cache in caches
            ],
            dispatcher,
            max_model_len=settings.max_model_len,
            epoch=settings.epoch,
            num_drafts=config.speculative.num_tokens,
            tp=layout.tp,
            pcp=layout.pcp,
            choose_exchange=settings.exchange.choose,
            exact=config.recovery.exact,
            look_ups=look_ups,
            files=files,
        )
        ranks = ChannelRanks(
            self._channel,
            self._world_ranks,
            lambda: scheduler.epoch,
            self._raise_if_dead,
            pool_bytes=settings.report["pool_bytes"],
        )
        timeouts = config.timeouts
        clients = ClientLinks(self._clients_at, settings.token, timeouts.link_s)
        self._loop = EngineLoop(
            scheduler,
            self._channel,
            clients,
            vocab_size=settings.vocab_size,
            step_timeout_s=timeouts.step_s,
            turn_timeout_s=timeouts.link_s,
            is_held=self._lease.is_held,
            steps_in_flight=config.scheduler.steps_in_flight,
            late_decisions=LateDecisions() if config.scheduler.late_decisions else None,
            changes=GraphChanges(
                dispatcher,
                GraphTransaction(ranks, timeouts.negotiate_s, timeouts.capture_s),
                settings.costs,
            ),
            resumption=self._resumption,
            kv_events=KVEvents(caches, publisher_place(events)) if events.publish else None,
            fetches=self._fetches,
            report=lambda: {
                **settings.report,
                "began_s": began_s,
                "pool_bytes": ranks.pool_bytes,
                "copies_bytes": {} if look_ups is None else look_ups.num_bytes(),
                "late_look_ups": 0 if look_ups is None else look_ups.num_late,
                "fetched": {} if self._fetches is None else asdict(self._fetches.counts),
                "restarts_left": self._restarts.num_left(time.monotonic()),
            },
        )
        # All objects that exist at this point stay alive until the engine ends. ``freeze`` excludes
        # these objects from later garbage collections.
        gc.collect()
        gc.freeze()
        self._log.group, self._log.get_epoch = settings.group, lambda: scheduler.epoch
        event(logger, "engine_serving", pid=os.getpid(), ranks=len(self._world_ranks))
        self._thread = threading.Thread(target=self._loop.run, name="engine-loop", daemon=True)
        self._thread.start()
        return EngineSockets(clients.address, blocks)

    def _share_blocks(self, settings: EngineSettings, files: GroupFiles) -> BlockSource | None:
        """If groups or services fetch files from each other, begin to serve this node's files of
        blocks to other nodes, and prepare to fetch files from other nodes. Return the addresses
        from which other groups and services fetch this group's files.

        With ``files.only_workers``, the workers fetch all files. The engine sends the workers the
        addresses of the other groups.
        """
        config, at, place = self._config, self._clients_at, files.places[0]
        if not config.sends_files:
            return None
        assert at is not None
        at = replace(at, host=settings.files_host)
        if config.kv.peers_host is not None:
            at = replace(at, remedy="set kv.peers_host to an address of this machine")
        places = () if files.only_workers else files.places_beside(0)
        self._fetches = BlockFetches(
            config, at.node_id, settings.token, places, str(settings.group)
        )
        if files.only_workers:
            return source_of(settings.servers, files)
        self._block_server = open_server(config, at, settings.token, tiers_of(config, place))
        here = NodeServer(self._block_server.address, cache_identity(config))
        return source_of([here, *settings.servers], files)

    def _raise_if_dead(self) -> None:
        assert self._loop is not None
        self._loop.raise_if_dead()

    def take_traffic(self) -> SeenTraffic:
        """Return the group's traffic since the last call."""
        assert self._loop is not None
        loop = self._loop
        return SeenTraffic(loop.plan, loop.take_traffic(), loop.step_seconds())

    def change_plan(self, plan: GraphPlan, actions: Sequence[Action]) -> None:
        """Change to another graph plan while the group serves."""
        assert self._loop is not None
        self._loop.change_plan(plan, actions)

    def set_groups(self, groups: GroupList) -> None:
        """Send the deployment's list of groups to all clients."""
        assert self._loop is not None
        self._loop.set_groups(groups)

    def set_restarts(self, ages_s: Sequence[float]) -> None:
        """Store the restarts of lost groups, for /metrics; see ``RestartBudget.ages_s``."""
        self._restarts.adopt(ages_s, time.monotonic())

    def drain(self, version: int, timeout_s: float) -> bool:
        """Wait until all running requests have ended. If the group computes prompts for other
        groups, also wait until these groups have fetched the last KV. See ``EngineLoop.drain``.
        """
        assert self._loop is not None
        end_s = time.monotonic() + timeout_s
        is_drained = self._loop.drain(version, timeout_s)
        if is_drained and self._block_server is not None:
            self._block_server.wait_until_quiet(end_s - time.monotonic())
        return is_drained

    def fail(self, reason: str) -> None:
        """End the epoch, because a worker is lost."""
        if self._loop is not None:
            self._loop.fail(reason)

    def wait_for_end(self) -> str:
        """Wait until the group has ended, and return why.

        The end of this call tells the controller that the engine has ended.
        """
        assert self._loop is not None
        return self._loop.wait_for_end()

    def demand(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait."""
        assert self._loop is not None
        return self._loop.demand()

    def report(self) -> dict[str, Any]:
        return {**self._loop.report(), "engine_pid": os.getpid()} if self._loop is not None else {}

    def stop(self) -> None:
        """End the loop, and let the workers leave their step loops."""
        if self._loop is not None and self._thread is not None:
            event(logger, "engine_stopping")
            self._loop.stop()
            self._thread.join(timeout=self._config.timeouts.stop_s)
        # The threads that fetch or send files can hang in a file system, so the wait for these
        # threads is limited. The limit leaves time for the later call of ``leave_copies``.
        limit_s = self._config.timeouts.stop_s / 4
        if self._fetches is not None:
            self._fetches.close(limit_s)
        if self._block_server is not None:
            self._block_server.close(limit_s)
        self._directory.remove()

    def leave_copies(self) -> None:
        """Delete the copies of KV in memory if no other group uses these copies. To be called after
        the loops of all workers have ended, so that no worker writes copies.
        """
        if self._copies is not None:
            self._copies.leave()
            self._copies = None
