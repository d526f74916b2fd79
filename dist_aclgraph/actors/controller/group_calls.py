"""Opens, drains and stops a group, with calls to its engine and workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from dist_aclgraph.actors.cluster import placement
from dist_aclgraph.actors.cluster.ray_errors import ours
from dist_aclgraph.actors.controller.lockstep_group import LockstepGroup, group_report
from dist_aclgraph.actors.controller.startup import EPOCH
from dist_aclgraph.actors.engine.engine import EngineSettings, EngineSockets
from dist_aclgraph.actors.wire.block_server import NodeServer
from dist_aclgraph.actors.worker.node_files import NodeFilesSettings
from dist_aclgraph.actors.worker.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.errors import WorkerError
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.topology import GroupRank

ANSWER_S = 10.0  # seconds to wait for an engine's response after the engine's own time limit


def open_group(group: LockstepGroup, token: str, controller_s: float) -> None:
    """Start the step loops of a group's workers. Store the address at which clients reach the
    engine in ``group.opened_at``.

    Args:
        token: the deployment's connection token.
        controller_s: the time at which the controller began to start groups (``time.monotonic``).

    Raises:
        WorkerError: a rank did not start its step loop.
    """
    planner = group.planner
    timeout_s = planner.config.timeouts.join_s
    leader = group.workers.infos[0]
    # HIXL only transfers files of KV blocks between nodes. So the group does not use HIXL if the
    # cluster cannot have other nodes.
    uses_hixl = planner.config.fetches_by_hixl and placement.may_have_others(leader.node_ip)
    files = GroupFiles.of(
        planner.config, planner.facts, group.workers.node_ids, only_workers=uses_hixl
    )
    servers = () if files is None else _open_node_files(group, files, token)
    asking = group.engine.channel_addresses.remote(group.workers.node_ids)
    group.loops = group.workers.start_loops(ray.get(asking, timeout=timeout_s), group.number)
    chip = Chip(group.offers[0].device, group.offers[0].cann)
    report = {
        **group_report(group),
        "accepts_float16": chip.accepts_float16(planner.config, planner.facts),
        "emulated": group.workers.is_emulated,
        "block_size": planner.config.kv.block_size,
        "max_model_len": planner.max_model_len,
        "mode_reasons": list(planner.mode_reasons),
        "ready_seconds": time.monotonic() - controller_s,
    }
    exchange = ExchangeRule.from_config(planner.config, planner.facts, chip)
    settings = EngineSettings(
        group=group.number,
        epoch=EPOCH,
        num_blocks=group.num_blocks,
        max_model_len=planner.max_model_len,
        vocab_size=planner.facts.vocab_size,
        plan=group.captured.plan,
        costs=group.captured.costs,
        lazy_capacity=group.lazy_capacity,
        exchange=exchange,
        counts_shared_blocks=chip.counts_shared_blocks(planner.config, planner.facts),
        has_state=planner.facts.linear is not None,
        files=files,
        servers=servers,
        token=token,
        files_host=_files_host(planner.config, leader.node_ip),
        report=report,
    )
    serving: Any = group.engine.serve.remote(settings)
    # If a worker dies, its loop ends. The wait ends as soon as one loop has ended, so that a dead
    # worker is noticed at once.
    ready, _ = ray.wait([serving, *group.loops], num_returns=1, timeout=timeout_s)
    if not ready:
        raise WorkerError(f"no step loop within {timeout_s:g} s", phase="CAPTURING")
    if ready[0] != serving:
        fetch(ready[0], group.workers.ranks[group.loops.index(ready[0])], "CAPTURING")
    sockets: EngineSockets = ray.get(serving, timeout=timeout_s)
    group.opened_at, group.blocks_at = sockets.clients, sockets.blocks


def _files_host(config: Config, node_ip: str) -> str | None:
    """Return the address at which an engine listens for peers that fetch files of KV; None if only
    processes on the engine's own node connect.

    Args:
        node_ip: the node's own address, as Ray knows it.
    """
    if config.kv.peers_key_file is not None:
        return config.kv.peers_host or node_ip
    return node_ip if placement.may_have_others(node_ip) else None


def _open_node_files(group: LockstepGroup, files: GroupFiles, token: str) -> tuple[NodeServer, ...]:
    """Let workers manage the files of KV blocks of each node except the engine's node. The engine
    manages the files of its own node, unless ``GroupFiles.only_workers`` is set. In that case,
    workers manage the files of all nodes.

    Returns:
        The servers that these workers run, in the order of ``files.nodes``. Other groups fetch
        files from these servers. Empty if no other group fetches files.

    Raises:
        WorkerError: a worker did not answer in time.
        DistAclGraphError: the error of a worker.
    """
    workers, config = group.workers, group.planner.config
    sends_files = config.sends_files
    servers = files.servers if sends_files else []
    finders = {rank for dp_rank in range(files.num_dp) for rank in files.finders(dp_rank)}
    group.file_ranks = [GroupRank(rank) for rank in sorted(finders.union(servers))]
    opening = {}
    for rank in group.file_ranks:
        info = workers.infos[rank]
        settings = NodeFilesSettings(
            info.node_id,
            info.node_ip,
            token,
            files.places_beside(rank),
            files.nodes.index(info.node_id),
            finds=rank in finders,
            fetches=sends_files,
            serves=rank in servers,
            uses_hixl=files.only_workers,
        )
        opening[rank] = workers.workers[rank].open_node_files.remote(settings)
    num_late = len(opening) - len(_wait(list(opening.values()), config.timeouts.join_s))
    if num_late:
        raise WorkerError(
            f"{num_late} workers could not use their nodes' files of KV blocks within "
            f"{config.timeouts.join_s:g} s (timeouts.join_s)",
            phase="CAPTURING",
        )
    found = {rank: fetch(ref, workers.ranks[rank], "CAPTURING") for rank, ref in opening.items()}
    return tuple(found[GroupRank(rank)] for rank in servers)


def drain_groups(
    groups: Sequence[LockstepGroup], version: int
) -> Iterator[tuple[LockstepGroup, str]]:
    """Drain all groups at the same time. Yield each group with the reason why the group could not
    drain. The reason is "" if the group has drained.

    Args:
        version: version of the first group list in which these groups are draining.
    """
    draining: dict[Any, LockstepGroup] = {}
    for group in groups:
        timeout_s = group.planner.config.timeouts.drain_s
        draining[group.engine.drain.remote(version, timeout_s)] = group
    deadline_s = time.monotonic() + ANSWER_S
    deadline_s += max(group.planner.config.timeouts.drain_s for group in groups)
    while draining:
        left_s = max(0.0, deadline_s - time.monotonic())
        ready, _ = ray.wait(list(draining), num_returns=1, timeout=left_s)
        for ref in ready or list(draining):
            group = draining.pop(ref)
            yield group, _problem_of_drain(ref, group) if ready else "it does not answer"


def _problem_of_drain(ref: Any, group: LockstepGroup) -> str:
    """Return why a group has not drained; "" if it has drained."""
    try:
        if ray.get(ref):
            return ""
        return f"it took more than {group.planner.config.timeouts.drain_s:g} s"
    except RayError as e:  # the engine is dead; its requests have been resumed or have ended
        return str(ours(e, f"draining group {group.number}"))


def stop_groups(groups: Sequence[LockstepGroup], timeout_s: float) -> None:
    """End the loops of engines and workers. Then let one process on each node delete the KV copies
    in the node's memory, unless another group uses the copies. Finally, kill the processes that
    still run.
    """
    stopping = {group.engine.stop.remote(): group for group in groups if group.engine is not None}
    loops = [ref for group in stopping.values() for ref in group.loops]
    ended = [stopping[ref] for ref in _wait([*stopping, *loops], timeout_s) if ref in stopping]
    owners = [
        (group.engine, *map(group.workers.workers.__getitem__, group.file_ranks)) for group in ended
    ]
    _wait([each.leave_copies.remote() for group in owners for each in group], timeout_s)
    for group in groups:
        group.kill()


def _wait(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """Wait until all calls have ended, but at most ``timeout_s`` seconds. Return the calls that
    have ended.
    """
    if not refs:
        return []
    ended: list[Any] = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]
    return ended
