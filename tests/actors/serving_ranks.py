"""An engine's loop, a client of this loop, and real workers in processes that are started without
Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from dist_aclgraph.actors.capture.graph_changes import GraphChanges
from dist_aclgraph.actors.capture.graph_transaction import GraphTransaction
from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.engine.engine_loop import EngineLoop
from dist_aclgraph.actors.engine.resumption import Resumption
from dist_aclgraph.actors.wire.addresses import Address, Place
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.client_links import ClientLinks
from dist_aclgraph.actors.wire.step_channel import StepSender
from dist_aclgraph.config import Config
from dist_aclgraph.topology import GroupRank, WorldRank
from tests.actors.rank_processes import RankProcesses
from tests.checkpoints import VOCAB
from tests.deployments import Answer
from tests.lockstep import lockstep

NODE, TOKEN, WAIT_S, LOOK_S = "node", "secret", 60.0, 0.1


@dataclass
class ServingRanks:
    """The loop, the client and the rank processes of a serving group."""

    loop: EngineLoop
    client: EngineClient
    ranks: RankProcesses
    address: Address
    servers: tuple[Address, ...] = ()  # addresses of file servers, on nodes without the engine

    def submit(self, name: str, prompt: list[int], params: Any) -> Answer:
        answer = Answer()
        self.client.submit(name, prompt, params, [], answer.take)
        return answer


@dataclass(frozen=True)
class _Captured:
    """Stands for the ranks of a group. The ranks have captured all graphs of their plan, and never
    change these graphs.
    """

    ranks: tuple[WorldRank, ...]

    def carry_out(self, *_: Any) -> Any:
        raise AssertionError("a graph is captured again, or released")


@contextmanager
def serving_ranks(
    config: Config,
    directory: Path,
    fetches: BlockFetches | None = None,
    nodes: Mapping[str, Config] | None = None,
) -> Iterator[ServingRanks]:
    """Within this context, all ranks of ``config`` serve as one group.

    Args:
        fetches: see ``EngineLoop``.
        nodes: see ``lockstep``.
    """
    with lockstep(config, nodes) as group:
        ranks = group.ranks
        group.scheduler.epoch = 1
        place = Place(NODE, str(directory))
        ranks_per_batch = config.parallel.tp * config.parallel.pcp
        channel = StepSender(ranks.ranks, place, ranks_per_batch=ranks_per_batch)
        for rank, pipe in enumerate(ranks.workers):
            pipe.send(("serve", (channel.address_for(NODE, GroupRank(rank)),)))
        channel.wait_for_workers(WAIT_S, lambda: None)

        def stop(timeout_s: float, check: Callable[[], None]) -> dict[GroupRank, str]:
            return _stop(ranks, timeout_s, check)

        links = ClientLinks(place, TOKEN, WAIT_S)
        dispatcher = group.scheduler.dispatcher
        loop = EngineLoop(
            group.scheduler,
            channel,
            links,
            vocab_size=VOCAB,
            step_timeout_s=WAIT_S,
            turn_timeout_s=WAIT_S,
            is_held=lambda: True,
            steps_in_flight=config.scheduler.steps_in_flight,
            changes=GraphChanges(
                dispatcher, GraphTransaction(_Captured(ranks.ranks), WAIT_S, WAIT_S), {}
            ),
            resumption=Resumption(channel, ranks.ranks, stop, config.recovery.resume_s),
            report=dict,
            fetches=fetches,
        )
        serves, is_over = threading.Thread(target=loop.run, daemon=True), threading.Event()
        serves.start()
        watch = threading.Thread(target=_watch, args=(ranks, loop, is_over), daemon=True)
        watch.start()
        client = EngineClient([links.address], TOKEN, node_id=NODE, link_s=WAIT_S)
        try:
            yield ServingRanks(loop, client, ranks, links.address, group.servers)
        finally:
            is_over.set()
            client.close()
            loop.stop()
            serves.join(WAIT_S)
            watch.join(WAIT_S)


def _stop(
    ranks: RankProcesses, timeout_s: float, check: Callable[[], None]
) -> dict[GroupRank, str]:
    """Stop the devices of all ranks, as an engine does through Ray."""
    for pipe in ranks.workers:
        pipe.send(("stop_device", (timeout_s,)))
    silent: dict[GroupRank, str] = {}
    deadline_s = time.monotonic() + timeout_s
    for rank, pipe in enumerate(ranks.workers):
        while not pipe.poll(LOOK_S):
            check()
            if time.monotonic() > deadline_s:
                return silent | {GroupRank(rank): "it did not stop in time"}
        try:
            answer = pipe.recv()
        except EOFError:
            answer = "its process is gone"
        if answer is not None:
            silent[GroupRank(rank)] = str(answer)
    return silent


def _watch(ranks: RankProcesses, loop: EngineLoop, is_over: threading.Event) -> None:
    """Report the death of a rank to the loop, as the controller does."""
    pids = [info.pid for info in ranks.infos]
    while not is_over.wait(LOOK_S):
        alive = {process.pid for process in active_children()}
        for rank, pid in enumerate(pids):
            if pid not in alive:
                loop.fail(f"rank {rank} in SERVING: the process {pid} died")
                return
