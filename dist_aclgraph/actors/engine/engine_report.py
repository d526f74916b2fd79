"""An engine's report about its group, with the counters and gauges for /metrics."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.actors.host import processes
from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, plan_report
from dist_aclgraph.scheduler.scheduler import Scheduler

Costs = Mapping[BatchDescriptor, CaptureCost]


@dataclass(frozen=True)
class LoopCounts:
    """The counters of the engine's loop; the scheduler has other counters."""

    prompt_tokens: int
    generation_tokens: int
    steps: int
    # for each kind of fault, how many times the group was resumed after such a fault
    resumptions: Mapping[DeviceFault, int]
    num_read: Mapping[str, int]  # for each tier, the number of KV blocks that were read from it
    fetched: Mapping[str, int]  # counts of the workers on other nodes; see ``FetchCounts``


def group_metrics(
    scheduler: Scheduler, counts: LoopCounts, costs: Costs, ranks_report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a group's counters and gauges. Each value is a number, or a mapping from a label to a
    number.

    Args:
        costs: costs of all graphs that exist.
        ranks_report: facts about the ranks, from the controller.
    """
    stats = scheduler.stats()
    fetched = Counter(ranks_report.get("fetched", {})) + Counter(counts.fetched)
    return {
        "num_requests_running": stats["running"],
        "num_requests_waiting": stats["waiting"],
        "num_requests_running_by_dp_rank": {
            str(rank.index): len(rank.running) for rank in scheduler.ranks
        },
        "kv_cache_usage": stats["blocks_used"] / stats["blocks_usable"],
        "kv_cache_usage_by_dp_rank": {
            str(rank.index): rank.pool.num_used / rank.pool.num_usable for rank in scheduler.ranks
        },
        "num_preemptions": stats["preemptions"],
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generation_tokens,
        "prefix_cache_queries": stats["admitted_tokens"],
        "prefix_cache_hits": stats["cached_tokens"],
        "kv_copied_blocks": scheduler.copies.counts(),
        "kv_read_blocks": counts.num_read,
        "kv_copies_bytes": ranks_report.get("copies_bytes", {}),
        "kv_late_look_ups": ranks_report.get("late_look_ups", 0),
        "kv_fetched_blocks": fetched.get("blocks", 0),
        "kv_fetched_bytes": fetched.get("num_bytes", 0),
        "kv_failed_fetches": fetched.get("failures", 0),
        "spec_decode_num_drafts": stats["drafts"],
        "spec_decode_num_draft_tokens": stats["draft_tokens"],
        "spec_decode_num_accepted_tokens": stats["accepted_tokens"],
        "spec_decode_num_accepted_tokens_per_pos": {
            str(position): count for position, count in enumerate(scheduler.accepted_by_position)
        },
        "expert_tokens": _by_rank(scheduler.expert_tokens, ranks_report),
        "steps": counts.steps,
        "step_reruns": stats["reruns"],
        "non_finite_requests": stats["non_finite"],
        "resumptions": counts.resumptions,
        "graph": scheduler.dispatcher.report(),
        "capture_seconds": {str(graph): cost.seconds for graph, cost in costs.items()},
        "pool_bytes": ranks_report.get("pool_bytes", 0),
        "weight_bytes": ranks_report.get("weight_bytes", 0),
        "memory_offered_bytes": {
            str(rank["rank"]): rank["offered_bytes"] for rank in ranks_report.get("ranks", [])
        },
        "ranks": _places(ranks_report),
        "streams_offered": _streams(ranks_report, "offered"),
        "streams_predicted": _streams(ranks_report, "predicted"),
        "streams_measured": _streams(ranks_report, "measured"),
        "group_start_time_seconds": ranks_report.get("began_s"),
        "restarts_left": ranks_report.get("restarts_left"),
        **host_metrics(ranks_report),
    }


def host_metrics(ranks_report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the memory and open files of the group's processes on this host, and the host's
    memory.

    Processes on other hosts are left out. The call takes about 10 µs per process.
    """
    host = socket.gethostname()
    pids = {
        f"worker-{rank['rank']}": rank["pid"]
        for rank in ranks_report.get("ranks", [])
        if rank["host"] == host
    }
    own = {"engine": os.getpid()}
    memory = {name: processes.resident_bytes(pid) for name, pid in (own | pids).items()}
    total, available = processes.host_memory()
    return {
        "process_resident_memory_bytes": {name: size for name, size in memory.items() if size},
        "process_open_fds": {name: processes.count_open_files(pid) for name, pid in own.items()},
        "host_memory_bytes": {host: total},
        "host_memory_available_bytes": {host: available},
    }


def _by_rank(counts: Mapping[int, int], ranks_report: Mapping[str, Any]) -> dict[str, int]:
    """Return ``counts`` with world ranks as keys. The keys of ``counts`` are group ranks."""
    world_ranks = [rank["rank"] for rank in ranks_report.get("ranks", [])]
    return {
        str(world_ranks[place] if world_ranks else place): count
        for place, count in sorted(dict(counts).items())
    }


def _places(ranks_report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return labels for each rank: its node, its NPUs, and whether the NPUs are emulated."""
    kind = "emulated" if ranks_report.get("emulated") else "npu"
    return {
        str(rank["rank"]): {
            "node": rank["host"],
            "npus": " ".join(map(str, rank["npu_ids"])),
            "kind": kind,
        }
        for rank in ranks_report.get("ranks", [])
    }


def _streams(ranks_report: Mapping[str, Any], which: str) -> dict[str, int]:
    """Return the number of streams of each rank. ``which`` chooses between the offered, the
    predicted and the measured number.
    """
    ranks = ranks_report.get("ranks", [])
    return {str(rank["rank"]): rank["streams"][which] for rank in ranks}


def group_report(
    scheduler: Scheduler, costs: Costs, step_seconds: Mapping[BatchDescriptor, float]
) -> dict[str, Any]:
    """Return the current plan, and the existing graphs with their counters."""
    dispatcher = scheduler.dispatcher
    counters = dispatcher.report()
    lazy = () if dispatcher.lazy is None else dispatcher.lazy.graphs
    buckets = [
        {
            "graph": str(graph),
            "mode": graph.mode,
            "bucket": graph.num_tokens,
            "is_lazy": graph in lazy,
            "capture_seconds": costs[graph].seconds,
            "streams": costs[graph].streams,
            "bytes": costs[graph].bytes,
            "ai_cpu": costs[graph].ai_cpu,
            "replays": counters["replays"].get(str(graph), 0),
            "padded_tokens": counters["padded_by_graph"].get(str(graph), 0),
            "wasted_fraction": counters["wasted_by_graph"].get(str(graph), 0.0),
            "step_seconds": step_seconds.get(graph, 0.0),
        }
        for graph in sorted(costs, key=lambda graph: (-graph.num_tokens, graph.mode))
    ]
    warnings = [costs[graph].ai_cpu_warning(graph) for graph in costs]
    return {
        "plan": plan_report(dispatcher.plan),
        "buckets": buckets,
        "graph_warnings": [warning for warning in warnings if warning],
        "eager_steps": counters["misses"],
    }
