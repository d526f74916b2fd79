"""The worker actor: one NPU, one rank. Cold phases are calls; steps come over the step channel.

Heavy imports happen inside methods, after Ray has set this process's environment: torch_npu reads
it once, at import.
"""

from __future__ import annotations

import gc
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from dist_aclgraph.actors.processes import leave_with_parent
from dist_aclgraph.actors.step_channel import ChannelAddress, StepReceiver
from dist_aclgraph.config import Config
from dist_aclgraph.environment import launch_blocking, visible_devices
from dist_aclgraph.errors import DistAclGraphError, RankDisagreementError
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.planning.budget import StreamOffer, max_piecewise_sizes
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.memory import RankMemory
from dist_aclgraph.planning.modes import GraphSupport, normalise_mode
from dist_aclgraph.planning.plan import CaptureCost, GraphPlan
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.shapes.model_spec import ModelSpec, read_model_spec
from dist_aclgraph.steps.step import StepPlan, StepResult
from dist_aclgraph.topology import NO_RANK, GroupRank, ParallelLayout, WorldRank

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu
    from dist_aclgraph.engine.model_runner import ModelRunner
    from dist_aclgraph.layers.experts import ExpertSetup
    from dist_aclgraph.models.decoder import Decoder

NO_PLAN = GraphPlan(version=0, mode="NONE", budget_model="legacy-last")


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker landed."""

    node_id: str
    node_ip: str
    host: str
    pid: int
    npu_ids: tuple[int, ...]


class Worker:
    """State of one rank, from placement to death. A worker is never restarted: its group is."""

    def __init__(self, config: Config, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._rank = NO_RANK
        self._phase = "PLACING"
        self._last_step = -1
        self._progress = (0, 0)  # layers loaded, layers in all
        self._doing = ""
        self._streams_taken: dict[str, int] = {}
        self._plan = NO_PLAN
        self._npu: Npu
        self._model: Decoder
        self._runner: ModelRunner

    # ---- answered at any time, on a thread of its own

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def ping(self) -> dict[str, Any]:
        """Say where this worker stands: rank, phase, last step, progress of loading.

        ``waits`` says whether its host waits for the device.
        """
        return {
            "rank": self._rank,
            "phase": self._phase,
            "step": self._last_step,
            "doing": self._doing,
            "waits": self._phase not in ("PLACING", "JOINING") and self._npu.is_waiting,
            "progress": self._progress,
        }

    # ---- phases, in order

    def describe(self) -> WorkerInfo:
        """Say where this worker landed. From now on it leaves with the raylet that started it."""
        leave_with_parent()
        context = ray.get_runtime_context()
        return WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            npu_ids=visible_devices() or (),
        )

    def join(self, rank: WorldRank, group_rank: GroupRank, group_size: int, rendezvous: str) -> str:
        """Open the device and join the lockstep group; return the device in plain words.

        Args:
            group_rank, group_size: place in the lockstep group; answers carry it.
        """
        from dist_aclgraph.comm.groups import join_lockstep_group, make_groups
        from dist_aclgraph.device.npu import open_npu

        self._rank, self._phase = rank, "JOINING"
        # In this process's environment, that of its node: nobody else can see it.
        normalise_mode(self._config.graph.mode, GraphSupport(), launch_blocking=launch_blocking())
        self._npu = open_npu(self._config.device, rank)
        self._available_streams = self._npu.available_streams()
        if group_size > 1:
            join_lockstep_group(rendezvous, group_rank, group_size, self._config.timeouts.join_s)
        self._group_rank = group_rank
        layout = ParallelLayout.from_config(self._config.parallel).within_group
        self._groups = make_groups(layout, group_rank)
        self._domains = layout.domains_of(group_rank)
        self._book_streams("joining HCCL groups")
        return self._npu.description

    def _book_streams(self, what: str) -> None:
        """Enter who took the streams that went since the last entry."""
        available = self._npu.available_streams()
        if available != self._available_streams:
            self._streams_taken[what] = self._available_streams - available
        self._available_streams = available

    def load(self) -> int:
        """Load this rank's weights; return their bytes.

        Raises:
            ConfigError: the device does not hold them, or no KV blocks beside them, or the wanted
                exchange is not to be had.
        """
        from dist_aclgraph.engine.model_runner import TORCH_DTYPES
        from dist_aclgraph.models.checkpoint import Checkpoint
        from dist_aclgraph.models.decoder import Decoder

        self._phase = "LOADING"
        config = self._config
        spec = read_model_spec(config.model)
        before = self._npu.memory().free_bytes
        self._check_needs(spec, before)
        self._model = Decoder(
            spec,
            self._groups,
            Checkpoint(
                config.model,
                TORCH_DTYPES[config.dtype],
                quantises=config.quantization == "w8a8",
            ),
            device=self._npu.device,
            max_len=config.max_model_len or spec.max_position_embeddings,
            drafts=config.speculative.num_tokens > 0,
            progress=self._note_progress,
            experts=self._make_expert_setup(spec),
        )
        self._npu.synchronize()
        return before - self._npu.memory().free_bytes

    def _check_needs(self, spec: ModelSpec, free_bytes: int) -> None:
        """Refuse, before anything is read, what cannot be had or cannot fit by known bytes."""
        config, facts = self._config, read_model_facts(self._config.model)
        ExchangeRule.from_config(config, facts, self._npu.name)
        # What HCCL takes is documented and not measured: no reason to refuse.
        memory = RankMemory.from_config(config, facts, spec, free_bytes, has_hccl_buffers=False)
        memory.check(config, f"the NPU of rank {self._rank}")
        KVCacheSpec.from_config(config, facts).choose_num_blocks(
            config, memory.free_bytes, config.max_model_len or facts.max_position_embeddings
        )

    def _make_expert_setup(self, spec: ModelSpec) -> ExpertSetup:
        from dist_aclgraph.layers.experts import ExpertSetup
        from dist_aclgraph.layers.shared_experts import SideStream

        has_shared = spec.experts is not None and spec.experts.num_shared > 0
        side = SideStream() if has_shared and self._config.graph.overlap_shared_experts else None
        self._book_streams("side stream of shared experts, and the pool that all streams are of")
        return ExpertSetup(self._groups, self._config.parallel.expert_capacity, side)

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def make_runner(self, num_blocks: int, max_len: int, graphs: list[BatchDescriptor]) -> None:
        """Make a runner with a KV cache for trying things out, and buffers for all ``graphs``."""
        from dist_aclgraph.device.npu import translated
        from dist_aclgraph.engine.model_runner import ModelRunner

        self._phase = "NEGOTIATING"
        with translated("allocating the buffers of graphs"):
            self._runner = ModelRunner(
                self._config,
                self._npu,
                self._model,
                num_blocks=num_blocks,
                max_len=max_len,
                graphs=graphs,
                owns_output=self._groups.tp.rank == 0,
                choose_exchange=ExchangeRule.from_config(
                    self._config, read_model_facts(self._config.model), self._npu.name
                ).choose,
            )
        self._book_streams("main, update and capture streams")

    def make_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache, of as many blocks as every other rank's."""
        from dist_aclgraph.device.npu import translated

        with translated("allocating the KV cache"):
            self._runner.make_cache(num_blocks)

    def offer(self) -> StreamOffer:
        """Say what this rank can give to graphs.

        Called after eager steps, when the HCCL domains and side streams exist, and before any
        capture: with software queues the count does not rise again when graphs are released.
        """
        self._phase = "CAPTURING"
        available = self._npu.available_streams()
        chips = ",".join(map(str, visible_devices() or (os.getpid(),)))
        return StreamOffer(
            rank=self._rank,
            available=available,
            counts_graphs=self._runner.free_streams is not None,
            reserve=self._config.graph.reserve_streams,
            free_bytes=self._npu.memory().free_bytes,
            device=self._npu.name,
            card=f"{socket.gethostname()}:{chips}",
            max_sizes=max_piecewise_sizes(self._npu.name),
            taken=self._streams_taken,
        )

    def carry_out(self, command: GraphCommand) -> GraphAnswer:
        """Do one move of a graph transaction: a call before serving, a message while serving."""
        from dist_aclgraph.device.failures import classify

        self._doing = str(command)
        cost, failure, message = CaptureCost(), None, ""
        try:
            cost = self._move(command) or cost
        except DistAclGraphError as e:
            failure, message = classify(e), str(e)
        self._doing = ""
        return GraphAnswer(
            command.epoch,
            command.number,
            self._group_rank,
            failure=failure,
            message=message,
            plan_hash=self._plan.hash,
            cost=cost,
            free_streams=self._runner.free_streams,
            live_bytes=self._runner.pool_memory.live_bytes,
            pool_bytes=self._runner.pool_memory.total_bytes,
        )

    def _move(self, command: GraphCommand) -> CaptureCost | None:
        if command.plan is not None:
            self.adopt(command.plan)
            return None
        assert command.graph is not None
        if command.action == "capture":
            return self._runner.capture(command.graph)
        if command.action == "prepare":
            self._runner.warm_up(command.graph)
            self._book_domains()
        elif command.action == "commit":
            self._runner.commit(command.graph)
        else:
            self._runner.release(command.graph)
        return None

    def _book_domains(self) -> None:
        """Before the offer: a domain takes its streams at its first collective."""
        if self._phase == "NEGOTIATING":
            sizes = " and ".join(str(len(ranks)) for ranks in self._domains) or "no"
            mode = self._config.device.hccl_expansion
            self._book_streams(f"HCCL domains of {sizes} ranks, expanded by {mode}")

    def adopt(self, plan: GraphPlan) -> None:
        """Hold a plan: from now on, steps must name its version."""
        self._plan = plan

    def pool_bytes(self) -> int:
        """Bytes that all captured graphs together hold."""
        return self._runner.pool_memory.total_bytes

    def check_plan(self, step: StepPlan) -> None:
        """Refuse a step that was decided for another graph plan than the one held here.

        Raises:
            RankDisagreementError: names both versions.
        """
        if step.plan_version != self._plan.version:
            raise RankDisagreementError(
                f"step {step.step} names graph plan {step.plan_version}, this rank holds "
                f"{self._plan.version}",
                self._rank,
                "SERVING",
            )

    def execute(self, step: StepPlan) -> StepResult:
        """Run one step.

        Raises:
            RankDisagreementError: see ``check_plan``.
            DeviceError: the device failed.
        """
        self.check_plan(step)
        return self._runner.execute(step, self._groups.dp_rank, self._group_rank)

    def run_loop(self, address: ChannelAddress) -> None:
        """Execute steps until the engine says goodbye.

        Any failure is reported and ends this process's part: the group is then rebuilt or stopped.
        """
        self._phase = "SERVING"
        channel = StepReceiver(address)
        # What exists now lives as long as the worker: collections need not look at it again.
        gc.collect()
        gc.freeze()
        try:
            while (plan := channel.receive(self._epoch)) is not None:
                if isinstance(plan, GraphCommand):
                    channel.send(self.carry_out(plan))
                    continue
                self._last_step = plan.step
                try:
                    result = self.execute(plan)
                except Exception as e:
                    failure = StepResult(plan.epoch, plan.step, self._group_rank, error=str(e))
                    channel.send(failure)
                    raise
                channel.send(result)
                self._runner.prepare_next(channel.has_message)
        finally:
            channel.close()
