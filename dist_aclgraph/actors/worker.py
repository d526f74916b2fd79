"""The worker actor: one NPU, one rank. Cold phases are calls; steps come over the step channel.

Heavy imports happen inside the methods' collaborators, after Ray has set this process's environment:
torch_npu reads it once, at import.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from dist_aclgraph.actors.step_channel import ChannelAddress, StepReceiver
from dist_aclgraph.config import Config, visible_devices
from dist_aclgraph.scheduler.step import StepResult
from dist_aclgraph.topology import ParallelLayout

if TYPE_CHECKING:
    from dist_aclgraph.device.npu import Npu
    from dist_aclgraph.engine.model_runner import ModelRunner
    from dist_aclgraph.models.dense import DenseDecoder


@dataclass(frozen=True)
class WorkerInfo:
    """Where a worker landed."""

    node_id: str
    node_ip: str
    host: str
    pid: int
    npu_ids: tuple[int, ...]


@dataclass(frozen=True)
class CacheLimits:
    """What a rank's memory allows, for agreement on one number of blocks."""

    bytes_per_block: int
    free_bytes: int


@dataclass(frozen=True)
class CaptureOutcome:
    """How one bucket's capture went on one rank; ``failure`` is empty where it succeeded."""

    rank: int
    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failure: str = ""  # "streams", "memory", "operator" or "timeout"
    message: str = ""


class Worker:
    """State of one rank, from placement to death. A worker is never restarted: its group is."""

    def __init__(self, config: Config, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._rank = -1
        self._phase = "PLACING"
        self._last_step = -1
        self._npu: Npu
        self._model: DenseDecoder
        self._runner: ModelRunner

    # ---- answered at any time, on a thread of its own

    @ray.method(concurrency_group="control")
    def ping(self) -> dict[str, Any]:
        """Say where this worker stands: rank, phase, last step."""
        return {"rank": self._rank, "phase": self._phase, "step": self._last_step}

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
        if group_size > 1:
            join_lockstep_group(
                rendezvous, group_rank, group_size, self._config.timeouts.join_s
            )
        layout = ParallelLayout.from_config(self._config.parallel)
        self._group = make_group(layout.tp_ranks_in_group(group_rank), group_rank)
        return self._npu.description

    def load(self) -> int:
        """Load this rank's weights; return their bytes."""
        from dist_aclgraph.engine.model_runner import TORCH_DTYPES
        from dist_aclgraph.models.checkpoint import Checkpoint
        from dist_aclgraph.models.dense import DenseDecoder
        from dist_aclgraph.models.spec import read_model_spec

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
        self._last_step = done

    def run_loop(self, address: ChannelAddress) -> None:
        """Execute steps until the engine says goodbye.

        Any failure is reported and ends this process's part: the group is then rebuilt or stopped.
        """
        self._phase = "SERVING"
        channel = StepReceiver(address)
        try:
            while (plan := channel.receive(self._epoch)) is not None:
                self._last_step = plan.step
                try:
                    result = self._runner.execute(plan, self._dp_rank, self._rank)
                except Exception as e:
                    failure = StepResult(plan.epoch, plan.step, self._rank, error=str(e))
                    channel.send(failure)
                    raise
                channel.send(result)
        finally:
            channel.close()
