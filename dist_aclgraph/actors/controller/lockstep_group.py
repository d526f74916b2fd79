"""What the controller stores about one lockstep group, and the group's report."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray

from dist_aclgraph.actors.capture.lockstep_capture import CaptureRecord
from dist_aclgraph.actors.controller.group_state import GROUP_TRANSITIONS, GroupState
from dist_aclgraph.actors.wire.addresses import Address
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.messages import GroupEntry
from dist_aclgraph.actors.worker.rank_facts import JoinedDevice
from dist_aclgraph.actors.worker.worker_group import WorkerGroup
from dist_aclgraph.planning.budget import StreamOffer
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.planning.plan import plan_report
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.planning.way_back import Failure, Way, way_back
from dist_aclgraph.topology import GroupRank


@dataclass
class LockstepGroup:
    """What the controller stores about one lockstep group.

    Attributes:
        planner: the planner for the configuration of this group. The groups of a deployment may
            have different configurations.
    """

    workers: WorkerGroup
    planner: Planner
    engine: Any = None
    # The devices of all ranks that have joined.
    devices: list[JoinedDevice] = field(default_factory=list)
    weight_bytes: int = 0
    # The fused operators of rank 0, as ``Fusions.report`` returns them.
    fusions: dict[str, str] = field(default_factory=dict)
    num_blocks: int = 0
    offers: list[StreamOffer] = field(default_factory=list)
    ledgers: list[Ledger] = field(default_factory=list)
    record: CaptureRecord | None = None
    pool_bytes: int = 0
    lazy_capacity: int = 0
    loops: list[Any] = field(default_factory=list)
    number: int = 0  # clients use this number as the group's name; each group has its own number
    opened_at: Address | None = None  # address at which clients reach the group's engine
    blocks_at: BlockSource | None = None  # address at which other groups fetch the KV of prompts
    # The workers that manage files of KV blocks. The engine manages no files of other nodes.
    file_ranks: list[GroupRank] = field(default_factory=list)
    state: GroupState = GroupState.STARTING
    opened_s: float = 0.0  # time when the group started to serve
    prefills: bool = False  # whether the group computes prompts for other groups
    is_rejoined: bool = False  # whether surviving workers of a lost group are part of this group
    lost_because: str = ""  # why the group is lost; "" while it is not lost
    lost_s: float = 0.0  # time when the loss was noticed
    lost_ranks: set[GroupRank] = field(default_factory=set)
    _entering: threading.Lock = field(default_factory=threading.Lock)  # protects the state

    @property
    def is_lost(self) -> bool:
        """Whether the group's epoch is over."""
        return self.state in (GroupState.LOST, GroupState.DETACHED, GroupState.ABANDONED)

    def enter(self, to: GroupState) -> bool:
        """Enter a state if the table allows the transition; return whether the state was entered.

        Callers must check the result, because the thread of ``GroupWatch`` may have changed the
        state to LOST meanwhile.
        """
        with self._entering:
            is_allowed = to in GROUP_TRANSITIONS[self.state]
            if is_allowed:
                self.state = to
            return is_allowed

    @property
    def served_s(self) -> float:
        """Number of seconds from the time when the group began to serve until its loss."""
        return self.lost_s - self.opened_s

    @property
    def address(self) -> Address:
        assert self.opened_at is not None, "opened before it is asked for"
        return self.opened_at

    @property
    def entry(self) -> GroupEntry:
        """The facts about the group that are sent to clients."""
        config = self.planner.config
        return GroupEntry(
            str(self.number),
            self.address,
            self.num_blocks * self.planner.layout.within_group.dp,
            self.planner.cache_spec.tokens_per_block,
            self.state is GroupState.DRAINING,
            config.parallel.prefill_from_tokens if self.prefills else 0,
            self.blocks_at if self.prefills or config.kv.peers_key_file else None,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the group that are written to the log."""
        return {
            "group": self.number,
            "ranks": ",".join(map(str, self.workers.ranks)),
            "hosts": ",".join(dict.fromkeys(info.host for info in self.workers.infos)),
            "pids": ",".join(str(info.pid) for info in self.workers.infos),
            "blocks": self.num_blocks,
            "prefills": self.prefills,
            "is_rejoined": self.is_rejoined,
        }

    @property
    def num_rows(self) -> int:
        """Number of requests that the group can run at once."""
        planner = self.planner
        return planner.config.scheduler.max_num_seqs * planner.layout.within_group.dp

    @property
    def captured(self) -> CaptureRecord:
        assert self.record is not None
        return self.record

    @property
    def name(self) -> str:
        """The group's name in messages, e.g. ``the group of ranks 2, 3``."""
        return f"the group of ranks {', '.join(map(str, self.workers.ranks))}"

    def way_back(self) -> Way:
        """Return how the lost group can be replaced. The result can change when more ranks are
        lost.
        """
        if self.state is GroupState.ABANDONED:
            return "REBUILD"
        recovery = self.planner.config.recovery
        return way_back(
            Failure(
                {},
                frozenset(self.lost_ranks),
                may_resume=recovery.resume_s > 0 and recovery.restarts_per_hour > 0,
                is_over=True,
                size=len(self.workers.ranks),
                served_s=self.served_s if self.is_rejoined else None,
            )
        )

    def give_up(self) -> None:
        """Kill all workers of a lost group, so that its NPUs become free. No worker can then join
        another group.
        """
        if self.enter(GroupState.ABANDONED):
            self.workers.kill()

    def kill(self) -> None:
        if self.engine is not None:
            ray.kill(self.engine)
        self.workers.kill()


def group_report(group: LockstepGroup) -> dict[str, Any]:
    """Return the plan, the buckets and the ranks as plain values; unknown values are empty."""
    record = group.record
    return {
        "device": group.devices[0].description if group.devices else "",
        "plan": None if record is None else plan_report(record.plan),
        "rollbacks": [] if record is None else record.rollbacks,
        "pool_bytes": group.pool_bytes,
        "weight_bytes": group.weight_bytes,
        "fusions": group.fusions,
        "num_blocks": group.num_blocks,
        "ranks": [_rank_report(group, index) for index in range(len(group.ledgers))],
    }


def _rank_report(group: LockstepGroup, index: int) -> dict[str, Any]:
    ledger, info = group.ledgers[index], group.workers.infos[index]
    measured = [entry.measured or 0 for entry in ledger.entries if entry.unit == "streams"]
    return {
        "rank": ledger.rank,
        "host": info.host,
        "node": info.node_ip,
        "npu_ids": list(info.npu_ids),
        "pid": info.pid,
        "offered_bytes": group.offers[index].free_bytes,
        "streams": {
            "offered": ledger.offered_streams,
            "taken": group.offers[index].taken,
            "predicted": ledger.predicted_streams,
            "measured": sum(measured),
        },
        "ledger": msgspec.to_builtins(ledger),
        "warnings": ledger.warnings(),
    }
