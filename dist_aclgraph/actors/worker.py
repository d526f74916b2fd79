"""The worker actor: one NPU, one rank. Cold phases are calls; steps come over the step channel.

Heavy imports happen inside methods, after Ray has set this process's environment: torch_npu reads
it once, at import.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from dist_aclgraph.actors.step_channel import ChannelAddress, StepReceiver
from dist_aclgraph.config import Config, visible_devices
from dist_aclgraph.errors import DistAclGraphError, RankDisagreementError
from dist_aclgraph.graph.budget import StreamOffer
from dist_aclgraph.graph.plan import CaptureCause, CaptureCost, GraphPlan
from dist_aclgraph.models.spec import read_model_spec
from dist_aclgraph.scheduler.step import StepPlan, StepResult

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu
    from dist_aclgraph.engine.model_runner import ModelRunner
    from dist_aclgraph.models.dense import DenseDecoder


NO_COST = CaptureCost()


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker landed."""

    node_id: str
    node_ip: str
    host: str
    pid: int
    npu_ids: tuple[int, ...]


@dataclass(frozen=True)
class CaptureOutcome:
    """How one bucket's warm-up or capture went on one rank; ``failure`` is None if it succeeded."""

    rank: int
    cost: CaptureCost = NO_COST
    failure: CaptureCause | None = None
    message: str = ""


class Worker:
    """State of one rank, from placement to death. A worker is never restarted: its group is."""

    def __init__(self, config: Config, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._rank = -1
        self._phase = "PLACING"
        self._last_step = -1
        self._progress = (0, 0)  # layers loaded, layers in all
        self._plan: GraphPlan
        self._npu: Npu
        self._model: DenseDecoder
        self._runner: ModelRunner

    # ---- answered at any time, on a thread of its own

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def ping(self) -> dict[str, Any]:
        """Say where this worker stands: rank, phase, last step, and progress of loading."""
        return {
            "rank": self._rank,
            "phase": self._phase,
            "step": self._last_step,
            "progress": self._progress,
        }

    # ---- phases, in order

    def describe(self) -> WorkerInfo:
        context = ray.get_runtime_context()
        return WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            npu_ids=visible_devices() or (),
        )

    def join(self, rank: int, group_rank: int, group_size: int, rendezvous: str) -> str:
        """Open the device and join the lockstep group; return the device in plain words.

        Args:
            rank: world rank.
            group_rank, group_size: place in the lockstep group.
        """
        from dist_aclgraph.comm.groups import join_lockstep_group, make_group
        from dist_aclgraph.device.npu import open_npu

        self._rank, self._phase = rank, "JOINING"
        self._npu = open_npu(self._config.device, rank)
        self._streams_at_open = self._npu.available_streams()
        if group_size > 1:
            join_lockstep_group(rendezvous, group_rank, group_size, self._config.timeouts.join_s)
        # A dense model's lockstep group is one tensor parallel group.
        self._group = make_group(range(group_size), group_rank)
        return self._npu.description

    def load(self) -> int:
        """Load this rank's weights; return their bytes."""
        from dist_aclgraph.engine.model_runner import TORCH_DTYPES
        from dist_aclgraph.models.checkpoint import Checkpoint
        from dist_aclgraph.models.dense import DenseDecoder

        self._phase = "LOADING"
        config = self._config
        spec = read_model_spec(config.model)
        before = self._npu.memory().free_bytes
        self._model = DenseDecoder(
            spec,
            self._group,
            Checkpoint(config.model, TORCH_DTYPES[config.dtype]),
            device=self._npu.device,
            max_len=config.max_model_len or spec.max_position_embeddings,
            progress=self._note_progress,
        )
        self._npu.synchronize()
        return before - self._npu.memory().free_bytes

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def free_bytes(self) -> int:
        """Return the device memory that is free, once weights are loaded."""
        return self._npu.memory().free_bytes

    def make_runner(self, num_blocks: int, max_len: int, max_decode_tokens: int) -> None:
        """Allocate KV blocks and static buffers, the same number on every rank."""
        from dist_aclgraph.device.npu import translated
        from dist_aclgraph.engine.model_runner import ModelRunner

        self._phase = "NEGOTIATING"
        with translated("allocating the KV cache and the buffers of decode graphs"):
            self._runner = ModelRunner(
                self._config,
                self._npu,
                self._model,
                num_blocks=num_blocks,
                max_len=max_len,
                max_decode_tokens=max_decode_tokens,
                owns_output=self._group.rank == 0,
            )

    def offer(self) -> StreamOffer:
        """Say what this rank can give to graphs.

        Called after one eager step, when the HCCL domains and side streams exist.
        """
        available = self._npu.available_streams()
        return StreamOffer(
            rank=self._rank,
            available=available,
            reserve=self._config.graph.reserve_streams,
            free_bytes=self._npu.memory().free_bytes,
            device=self._npu.name,
            taken={"default, update and capture streams, HCCL": self._streams_at_open - available},
        )

    def confirm(self, plan: GraphPlan) -> str:
        """Adopt a plan; return the hash of what this rank now holds."""
        self._plan = plan
        return plan.hash

    def warm_up(self, bucket: int) -> CaptureOutcome:
        """Run one bucket eagerly on padding rows; all ranks together, it communicates."""
        self._phase = "CAPTURING"
        return self._attempt(lambda: self._runner.warm_up(bucket))

    def capture(self, bucket: int, plan_hash: str) -> CaptureOutcome:
        """Capture one bucket of the plan that ``plan_hash`` names."""
        if plan_hash != self._plan.hash:
            raise RankDisagreementError(
                f"asked to capture for plan {plan_hash[:12]}, holds {self._plan.hash[:12]}",
                self._rank,
                "CAPTURING",
            )
        return self._attempt(lambda: self._runner.capture(bucket))

    def _attempt(self, work: Callable[[], CaptureCost | None]) -> CaptureOutcome:
        from dist_aclgraph.device.failures import classify

        try:
            cost = work()
        except DistAclGraphError as e:
            return CaptureOutcome(self._rank, failure=classify(e), message=str(e))
        return CaptureOutcome(self._rank) if cost is None else CaptureOutcome(self._rank, cost)

    def release(self, bucket: int) -> int:
        """Undo the capture of a bucket; return the streams that are available then."""
        self._runner.release(bucket)
        return self._npu.available_streams()

    def pool_bytes(self) -> int:
        """Bytes that all captured graphs together hold."""
        return self._runner.pool_bytes

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
                self._last_step = plan.step
                try:
                    self.check_plan(plan)
                    result = self._runner.execute(plan, 0, self._group.rank)
                except Exception as e:
                    failure = StepResult(plan.epoch, plan.step, self._group.rank, error=str(e))
                    channel.send(failure)
                    raise
                channel.send(result)
                self._runner.prepare_next(channel.has_plan)
        finally:
            channel.close()
