"""The configuration's keys of the device: the chip, its runtime, and the emulated NPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dist_aclgraph.config_section import Section

HcclExpansion = Literal["AIV", "AICPU", "FFTS"]


class FaultConfig(Section):
    """A fault that the emulator injects, for tests."""

    op: str = Field(
        "",
        description="operator, e.g. aclnnMm or HcclAllReduce; alloc: device memory in a capture",
    )
    when: Literal["execute", "capture"] = Field(
        "execute", description="which calls count: executions, replays too, or recordings"
    )
    call: int = Field(1, ge=1, description="at which of its calls")
    kind: Literal["fail", "stall", "die"] = Field(
        "fail", description="what happens at that call; die ends the process as kill -9 does"
    )
    rank: int | None = Field(None, ge=0, description="on which world rank; null means all")
    stall_s: float = Field(60.0, gt=0, description="how long a stall lasts")


class EmulatorConfig(Section):
    """The emulated NPU; nothing here matters on hardware."""

    strict: bool = Field(True, description="refuse what the documented operators refuse")
    streams: int = Field(2048, ge=1, le=65536, description="stream ids of one device")
    streams_by_rank: dict[int, int] = Field(
        default_factory=dict, description="stream ids where a world rank differs"
    )
    memory_mb: int = Field(4096, ge=16, description="device memory, counted and not reserved")
    memory_mb_by_rank: dict[int, int] = Field(
        default_factory=dict, description="device memory where a world rank differs"
    )
    kernels: Literal["compute", "skip"] = Field(
        "compute", description="skip leaves out arithmetic, to measure host time alone"
    )
    accounting: Literal["pinned", "software_sq"] = Field(
        "pinned", description="how captured graphs take streams, as old or as new drivers do"
    )
    soc: str = Field("Ascend910B1", description="name of the chip")
    wait_s: int = Field(60, ge=1, description="limit of a wait on the device")
    fault: FaultConfig = FaultConfig()


class DeviceConfig(Section):
    """Which device runs the model."""

    kind: Literal["auto", "npu", "emulated"] = Field(
        "auto", description="auto takes a real NPU where one answers, else the emulator"
    )
    task_queue: Literal[0, 1] = Field(
        0, description="torch_npu's TASK_QUEUE_ENABLE: 1 dispatches operators from a second thread"
    )
    hccl_expansion: HcclExpansion = Field(
        "FFTS",
        description="who unrolls a collective: vector cores, AI CPU (the default of A3), or the "
        "host with FFTS+ (that of A2); it decides what communication costs in streams",
    )
    hccl_buffer_mb: int = Field(
        200,
        ge=1,
        le=65536,
        description="HCCL's buffer of a communication domain (HCCL_BUFFSIZE); MC2 needs more for "
        "larger batches",
    )
    soc: str | None = Field(
        None,
        description="name of the chip that plans for kind npu assume, e.g. Ascend910B1 (an A2, as "
        "null does) or Ascend910_9391 (an A3); a running deployment asks",
    )
    emulator: EmulatorConfig = EmulatorConfig()
