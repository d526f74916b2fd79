"""The worker actor runs one rank on one NPU. The engine sends steps over the step channel.

The controller calls the phases by name through Ray; ``rank_stages`` implements them.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray

from dist_aclgraph.actors.host.liveness import Lease, leave_with, leave_with_raylet
from dist_aclgraph.actors.host.processes import end_process
from dist_aclgraph.actors.wire.addresses import open_meeting, url_host
from dist_aclgraph.actors.wire.block_server import NodeServer
from dist_aclgraph.actors.wire.step_channel import ChannelAddress, StepReceiver
from dist_aclgraph.actors.worker.device_faults import DeviceFaults
from dist_aclgraph.actors.worker.node_files import NodeFiles, NodeFilesSettings
from dist_aclgraph.actors.worker.rank_facts import JoinedDevice, LoadedWeights, WorkerInfo
from dist_aclgraph.actors.worker.rank_stages import JoinedRank, LoadedRank, RunningRank, join_rank
from dist_aclgraph.actors.worker.step_recorder import StepRecorder, open_recorder
from dist_aclgraph.config import Config
from dist_aclgraph.device import emulator
from dist_aclgraph.device.kind import resolve_kind
from dist_aclgraph.environment import prepare_network, visible_devices
from dist_aclgraph.errors import (
    DeviceError,
    DeviceFault,
    DistAclGraphError,
    EngineDeadError,
    RankDisagreementError,
)
from dist_aclgraph.kv.tiers import HostCopies
from dist_aclgraph.logs import ProcessLog, event
from dist_aclgraph.models.read_ahead import ALONE, Neighbour, read_ahead
from dist_aclgraph.planning.budget import StreamOffer
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan
from dist_aclgraph.shapes.weight_files import weight_files
from dist_aclgraph.steps.copies import BlockCopyJobs, CopiedBlocks
from dist_aclgraph.steps.step import Pause, RankPlan, Resume, Resumed, StepResult
from dist_aclgraph.topology import NO_RANK, GroupRank, WorldRank
from dist_aclgraph.version import build

logger = logging.getLogger(__name__)

NO_PLAN = GraphPlan(version=0, mode="NONE", budget_model="legacy-last")


class Worker:
    """State of one rank, from its placement to its end. A worker is never restarted.

    A worker can outlive its group: it leaves the group, and joins the next group with its weights.
    """

    def __init__(self, config: Config, epoch: int) -> None:
        self._config = config
        self._log = ProcessLog("worker", lambda: self._epoch)
        self._epoch = epoch
        self._rank = NO_RANK
        self._phase = "PLACING"
        self._last_step = -1
        self._neighbour = ALONE
        # Maps the process id of each other rank to a handle of the process.
        self._neighbours: dict[int, int] = {}
        self._progress = (0, 0)  # number of loaded bytes, and number of bytes of all weights
        self._doing = ""
        self._faults = DeviceFaults()
        self._leaving = threading.Lock()
        self._plan = NO_PLAN
        self._meeting: socket.socket | None = None
        self._recorder = StepRecorder()  # replaced when the worker joins a group
        self._stage: JoinedRank | LoadedRank | RunningRank | None = None
        self._lease = Lease(config.timeouts.link_s)
        self._channel: StepReceiver | None = None  # None while no step loop runs
        self._node_files: NodeFiles | None = None
        self._copies: HostCopies | None = None  # None if this worker manages no files

    @property
    def _joined(self) -> JoinedRank | None:
        stage = self._stage
        return stage if stage is None or isinstance(stage, JoinedRank) else stage.joined

    @property
    def _running(self) -> RunningRank:
        assert isinstance(self._stage, RunningRank), "the controller calls the phases in order"
        return self._stage

    # ---- methods that answer at any time, on the control thread

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def ping(self, number: int | None = None) -> dict[str, Any]:
        """Return this worker's status: rank, phase, last step, and progress of loading.

        ``waits`` says whether the worker's host thread waits for the device.

        Args:
            number: number of a ping from the controller. Such a ping renews the worker's lease.
                None for a ping from another process.
        """
        if number is not None:
            self._lease.renew(number)
        joined = self._joined
        if joined is not None:
            self._recorder.see(joined.groups.marks.read())
        return {
            "rank": self._rank,
            "phase": self._phase,
            "step": self._last_step,
            "doing": self._doing,
            "waits": joined is not None and joined.npu.is_waiting,
            "progress": self._progress,
        }

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop_device(self, timeout_s: float) -> None:
        """Abort the work on the device. The step loop then gets an error from the device.

        If the device does not stop in time, the process ends.

        Raises:
            DeviceError: the device cannot be stopped.
        """
        with self._leaving:
            if not isinstance(self._stage, RunningRank):
                return  # the worker has already left the group of this epoch
            self._faults.is_told_to_stop = True
            self._stage.joined.npu.stop(timeout_s)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def dismiss(self) -> None:
        """End the step loop, as if the engine's process had ended."""
        if self._channel is not None:
            self._channel.end()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def end_neighbour(self, pid: int, timeout_s: float) -> bool:
        """End another rank's process on this node. Return whether that process ended in time."""
        handle = self._neighbours.get(pid)
        return handle is not None and end_process(handle, timeout_s)

    # ---- phases, in order

    def describe(self) -> WorkerInfo:
        """Return where this worker runs. From now on, the worker exits if its raylet exits."""
        if self._stage is None:
            leave_with_raylet()
            self._log.open(self._config.logging)
        context = ray.get_runtime_context()
        return WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            npu_ids=visible_devices() or (),
            kind=resolve_kind(self._config.device.kind),
            has_weights=isinstance(self._stage, LoadedRank),
            build=build(),
        )

    def prepare(self, neighbour: Neighbour, pids: Sequence[int]) -> None:
        """Begin to read the weights' files. If NPUs are emulated, build the emulator.

        Args:
            pids: process ids of the group's other ranks on this node.
        """
        self._meet_neighbours(pids)
        if self._stage is not None:
            return  # the worker was prepared for a previous group
        self._neighbour = neighbour
        if self._config.weights != "dummy":
            read_ahead(weight_files(self._config.model), neighbour)
        if resolve_kind(self._config.device.kind) == "emulated":
            emulator.build()

    def _meet_neighbours(self, pids: Sequence[int]) -> None:
        for handle in self._neighbours.values():
            os.close(handle)
        self._neighbours.clear()
        for pid in pids:
            # A dead process gets no handle; later calls to the dead worker report its death.
            with contextlib.suppress(ProcessLookupError):
                self._neighbours[pid] = os.pidfd_open(pid)

    def open_meeting(self) -> str:
        """Listen for the other ranks of a group on several nodes. Return the listener's address.

        Raises:
            PlacementError: no port is free.
        """
        host = ray.util.get_node_ip_address()
        ports, timeout_s = self._config.cluster.port_range, self._config.timeouts.join_s
        self._meeting = open_meeting(host, ports, timeout_s)
        return f"tcp://{url_host(host)}:{self._meeting.getsockname()[1]}"

    def join(self, rank: WorldRank, group_rank: GroupRank, rendezvous: str) -> JoinedDevice:
        """Open the device and join the lockstep group; return the device.

        If the worker has weights, its weights, device, world rank and group rank stay the same.

        Args:
            group_rank: index in the lockstep group. The worker's answers contain this index.
        """
        self._rank, self._phase = rank, "JOINING"
        self._log.rank = rank
        event(logger, "rank_joining", pid=os.getpid(), npus=str(visible_devices() or "all"))
        if rendezvous.startswith("tcp://"):
            prepare_network(self._config.device, ray.util.get_node_ip_address())
        else:
            prepare_network(self._config.device)
        meeting, self._meeting = self._meeting, None
        if isinstance(self._stage, JoinedRank | LoadedRank):
            joined = self._joined
            assert joined is not None
            assert (joined.rank, joined.group_rank) == (rank, group_rank), "weights are a rank's"
            self._stage = self._stage.join_again(rendezvous, meeting)
            return joined.device
        self._stage = join_rank(self._config, rank, group_rank, rendezvous, meeting)
        return self._stage.device

    def load(self) -> LoadedWeights:
        """Load this rank's weights if none are loaded.

        Raises the same errors as ``JoinedRank.load``.
        """
        self._phase = "LOADING"
        if isinstance(self._stage, LoadedRank):
            return self._stage.weights
        assert isinstance(self._stage, JoinedRank)
        self._stage = self._stage.load(self._note_progress, self._neighbour.count)
        return self._stage.weights

    def leave(self, epoch: int) -> None:
        """Leave the lost lockstep group. Keep the device and the weights for the next group.

        If faulty memory can be freed only together with the weights, free the weights, too. The
        device must be stopped before this call. Waits until the step loop has ended.

        Args:
            epoch: epoch of the next group.

        Raises:
            DeviceError: the device does not recover, or its memory may be damaged.
        """
        self._faults.check_memory(self._running)
        self._log.group = None
        event(logger, "rank_survives")
        self._lease.give_back()
        self._lease = Lease(self._config.timeouts.link_s)
        with self._leaving:  # prevents ``stop_device`` while the rank leaves
            self._stage = self._running.leave()
        gc.unfreeze()
        self._give_back()
        joined = self._stage.joined
        if self._faults.holds_bad_memory(joined):
            self._stage = joined  # free the weights, which are in or near faulty memory
            self._give_back()
            if self._faults.holds_bad_memory(joined):
                raise DeviceError(f"rank {self._rank} cannot give back memory that was faulty")
        self._faults.end()
        self._epoch, self._plan, self._last_step = epoch, NO_PLAN, -1

    def _give_back(self) -> None:
        gc.collect()
        assert self._joined is not None
        self._joined.npu.give_back()

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def make_runner(self, num_blocks: int, max_len: int, graphs: list[BatchDescriptor]) -> None:
        """Create a runner with buffers for ``graphs``, and a small KV cache for trial steps."""
        assert isinstance(self._stage, LoadedRank)
        self._phase, joined = "NEGOTIATING", self._stage.joined
        self._stage = self._stage.make_runner(num_blocks, max_len, graphs)
        recorder = self._recorder = open_recorder(self._config, self._rank, joined.group_rank)
        self._running.runner.note_stages(recorder.lap)
        joined.npu.on_wait = recorder.wait

    def make_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache. The number of blocks must be the same on every rank."""
        self._running.make_cache(num_blocks)

    def offer(self) -> StreamOffer:
        """Return this rank's offer of resources for graphs, after eager steps have run."""
        offer = self._running.offer()
        self._phase = "CAPTURING"
        return offer

    def carry_out(self, command: GraphCommand) -> GraphAnswer:
        """Do one action of a graph transaction. The command comes from Ray or from the engine."""
        from dist_aclgraph.device.failures import classify

        rank = self._running
        self._doing = str(command)
        self._recorder.command(command)
        cost, failure, message = CaptureCost(), None, ""
        try:
            if command.plan is not None:
                self.adopt(command.plan)
            else:
                cost = rank.move(command)
                if self._phase == "NEGOTIATING":
                    rank.book_domains()
        except DistAclGraphError as e:
            failure, message = classify(e), str(e)
            if failure == "operator" and (fault := self._faults.fault_of(e, rank)) is not None:
                self._faults.note(fault)
        self._doing = ""
        self._recorder.idle()
        return GraphAnswer(
            command.epoch,
            command.number,
            rank.joined.group_rank,
            failure=failure,
            message=message,
            plan_hash=self._plan.hash,
            cost=cost,
            free_streams=rank.runner.free_streams,
            live_bytes=rank.runner.pool_memory.live_bytes,
            pool_bytes=rank.runner.pool_memory.total_bytes,
        )

    def adopt(self, plan: GraphPlan) -> None:
        """Store a plan. Later steps must name this plan's version."""
        self._plan = plan

    def pool_bytes(self) -> int:
        """Return the number of bytes that all captured graphs together use."""
        return self._running.runner.pool_memory.total_bytes

    def check_plan(self, step: RankPlan) -> None:
        """Check that a step is for this worker's graph plan and data-parallel rank.

        Raises:
            RankDisagreementError: the step is for another plan or another data-parallel rank.
        """
        dp_rank = self._running.joined.groups.dp_rank
        if step.dp_rank != dp_rank:
            raise RankDisagreementError(
                f"step {step.step} has the batch of data-parallel rank {step.dp_rank}, this rank "
                f"runs the batch of {dp_rank}",
                self._rank,
                "SERVING",
            )
        if step.plan_version != self._plan.version:
            raise RankDisagreementError(
                f"step {step.step} names graph plan {step.plan_version}, this rank holds "
                f"{self._plan.version}",
                self._rank,
                "SERVING",
            )

    def launch(self, step: RankPlan, report: Callable[[StepResult], None]) -> None:
        """Queue one step. If the oldest queued step has ended, call ``report`` with its result.

        Raises:
            RankDisagreementError: see ``check_plan``.
            DeviceError: the device failed.
        """
        self._last_step = step.step
        rank = self._running
        self._recorder.begin(step)
        self.check_plan(step)
        rank.joined.groups.marks.begin_step(step.step)
        rank.runner.launch(step, rank.joined.group_rank, report)

    def open_node_files(self, settings: NodeFilesSettings) -> NodeServer | None:
        """Begin to look up, fetch and serve the files of KV blocks on this node. This work stops
        when the step loop ends that starts next. Return the server for other groups. Raises the
        same errors as ``NodeFiles``.
        """
        self._node_files = NodeFiles(self._config, settings)
        if self._copies is None and self._config.kv.host_gib:
            self._copies = HostCopies(self._config)
        return self._node_files.server

    def leave_copies(self) -> None:
        """Delete the copies of KV in this node's memory; see ``Engine.leave_copies``."""
        if self._copies is not None:
            self._copies.leave()
            self._copies = None

    def run_loop(self, address: ChannelAddress, group: int | None = None) -> None:
        """Execute steps until the engine ends this worker's step loop.

        With two steps in flight, the worker queues a step on the device, and then sends the result
        of the previous step. The worker reports every failure to the engine. If a known fault
        stopped the device, the worker runs no step until the engine resumes the group. Any other
        failure ends the loop; then the group is rebuilt or stopped.
        """
        self._phase, self._log.group = "SERVING", group
        event(logger, "rank_serving")
        self._recorder.join(group)
        leave_with(self._lease, f"rank {self._rank}")
        self._channel = channel = StepReceiver(address)
        # All present objects live as long as the group, so garbage collections can skip them.
        gc.collect()
        gc.freeze()
        is_stopped = False
        try:
            while (plan := channel.receive(self._epoch)) is not None:
                if isinstance(plan, Resume):
                    answer = self._resume(plan)
                    is_stopped = bool(answer.error)
                    channel.send(answer)
                elif is_stopped:
                    continue
                elif isinstance(plan, GraphCommand):
                    channel.send(self.carry_out(plan))
                else:
                    try:
                        self._launch_for(plan, channel)
                    except EngineDeadError:
                        raise
                    except Exception as e:
                        fault = self._report_failure(e, channel)
                        if fault is None:
                            raise
                        is_stopped = True
            # All copies must end now, because the files in memory are deleted after this loop's
            # end.
            self._running.runner.end_copies(self._config.timeouts.stop_s / 2)
            if self._node_files is not None:
                self._node_files.wait_until_quiet(self._config.timeouts.stop_s / 4)
            self._recorder.end()
        except EngineDeadError as e:
            self._recorder.fail(e)
            raise
        finally:
            self._channel = None
            channel.close()
            if self._node_files is not None:
                self._node_files.close(self._config.timeouts.stop_s / 8)
                self._node_files = None

    def _launch_for(self, plan: RankPlan | Pause | BlockCopyJobs, channel: StepReceiver) -> None:
        runner, joined = self._running.runner, self._running.joined
        with joined.npu.launching():
            if isinstance(plan, BlockCopyJobs):
                channel.send(self._copy_blocks(plan))
            elif isinstance(plan, Pause):
                channel.send(runner.finish())
            else:
                self.launch(plan, channel.send)
                runner.prepare_next(channel.has_message)
        self._recorder.idle()

    def _copy_blocks(self, plan: BlockCopyJobs) -> CopiedBlocks:
        """Begin copy jobs, and continue earlier jobs."""
        runner, files, fetched = self._running.runner, self._node_files, dict[str, int]()
        ended = runner.copy_blocks([job for job in plan.jobs if not job.is_look_up])
        if files is not None:
            ended += files.advance([job for job in plan.jobs if job.is_look_up])
            fetched = files.fetched
        rank, num_read = self._running.joined.group_rank, runner.num_read()
        return CopiedBlocks(plan.epoch, plan.number, rank, tuple(ended), num_read, fetched)

    def _report_failure(self, error: Exception, channel: StepReceiver) -> DeviceFault | None:
        """Report a failure to the engine. Return the device's fault; None if it is unknown."""
        joined, fault = self._running.joined, self._faults.fault_of(error, self._running)
        self._faults.note(fault)
        # The failure is sent as the result of the next step. The engine would ignore a second
        # result for the last step.
        step = self._last_step + 1
        cause = f"{type(error).__name__}: {error}"
        event(logger, "rank_failed", logging.ERROR, step=step, fault=fault, cause=cause)
        if fault == "stopped":
            self._recorder.end()
        else:
            self._recorder.fail(error)
        channel.send(
            StepResult(self._epoch, step, joined.group_rank, error=str(error), fault=fault)
        )
        return fault

    def _resume(self, order: Resume) -> Resumed:
        """Make the device usable again, and enter the group's next epoch."""
        rank = self._running
        self._doing, error = "coming back", ""
        try:
            rank.resume(keeps_kv=order.keeps_kv)
            self._faults.end()
            self._epoch = order.next_epoch
            if self._node_files is not None:
                self._node_files.forget()
        except DistAclGraphError as e:
            error = str(e)
            # The earlier stop did not cause this error, so ``DeviceFaults.fault_of`` is not called.
            self._faults.note(rank.joined.npu.fault_of(e))
        self._doing = ""
        return Resumed(order.next_epoch, rank.joined.group_rank, error)
