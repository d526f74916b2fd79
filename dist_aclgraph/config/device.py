"""The configuration's keys of the device: the chip, its runtime, and the emulated NPU."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dist_aclgraph.config.chips import DIE_64_GB_MB, family_of, generation_of
from dist_aclgraph.config.section import Section

HcclExpansion = Literal["AIV", "AICPU", "FFTS"]
ANY_A2 = "Ascend910B"  # stands for a chip whose name is not known yet
ASSUMED_CANN = "9.1.0"  # belongs to the newest torch_npu whose CANN is published
PORTS = r"^(auto|[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*)$"


FaultKind = Literal["fail", "stall", "die", "link", "remote", "retry", "memory", "ecc", "uce"]


class FaultConfig(Section):
    """A fault that the emulator injects, for tests."""

    op: str = Field(
        "",
        description="operator, e.g. aclnnMm or HcclAllReduce; alloc: device memory in a "
        "capture; or a call: aclrtDeviceTaskAbort, HcclCommResume",
    )
    when: Literal["execute", "capture"] = Field(
        "execute", description="the calls that count: executions, replays included, or recordings"
    )
    call: int = Field(1, ge=1, description="number of the call at which the fault happens")
    kind: FaultKind = Field(
        "fail",
        description="effect of the fault. die ends the process like kill -9; link and all "
        "later kinds stop the device with that error; uce: memory turns bad, and a task that "
        "uses it stops the device",
    )
    rank: int | None = Field(
        None, ge=0, description="world rank of the fault; null means all ranks"
    )
    stall_s: float = Field(60.0, gt=0, description="duration of a stall")
    operand: int = Field(
        0, ge=0, description="kind uce: index of the operator's tensor whose memory turns bad"
    )
    offset: int = Field(
        0, ge=0, description="kind uce: offset of the bad memory from the tensor's begin, in bytes"
    )
    file: str = Field(
        "",
        description="a file that arms a fault in running workers, with words of "
        "emulator/README.md such as fault_op=aclnnMm fault_kind=stall; the worker that it hits "
        "removes the file",
    )


class EmulatorConfig(Section):
    """The emulated NPU; nothing here matters on hardware."""

    strict: bool = Field(True, description="refuse arguments that the documented operators refuse")
    trace: bool = Field(False, description="print every launch and every error to the worker's log")
    streams: int = Field(2048, ge=1, le=65536, description="stream ids of one device")
    streams_by_rank: dict[int, int] = Field(
        default_factory=dict, description="stream ids of single world ranks, if different"
    )
    memory_mb: int = Field(4096, ge=16, description="device memory, counted and not reserved")
    memory_mb_by_rank: dict[int, int] = Field(
        default_factory=dict, description="device memory of single world ranks, if different"
    )
    kernels: Literal["compute", "skip", "timed"] = Field(
        "compute",
        description="skip leaves out arithmetic, to measure host time alone; timed leaves it out, "
        "too, and keeps the device busy for a chip's modelled time (docs/develop/device-time.md)",
    )
    choices: int = Field(
        1,
        ge=1,
        description="kernels skip and timed: argmax chooses by chance among so many tokens, so "
        "a draft is accepted once in so many steps; with 1 always",
    )
    rates: str | None = Field(
        None,
        description="YAML or JSON file of rates for kernels timed, by the names of "
        "docs/develop/device-time.md; they replace the rates of that table",
    )
    rules: str | None = Field(
        None,
        description="file of a real device's rules, made by `dist-aclgraph probe --compare`; its "
        "settings replace those of the emulator",
    )
    accounting: Literal["pinned", "software_sq"] = Field(
        "pinned",
        description="how captured graphs take streams: as with old, or as with new drivers",
    )
    soc: str = Field("Ascend910B1", description="name of the chip; device.soc overrides it")
    cann: str = Field(
        ASSUMED_CANN,
        pattern=r"^(8\.5|9\.[0-9]+)\.[0-9]+$",
        description="version of CANN whose rules the operators follow: 8.5.0, 8.5.1, 9.0 or 9.1",
    )
    wait_s: int = Field(60, ge=1, description="limit of a wait on the device")
    fault: FaultConfig = FaultConfig()
    second_fault: FaultConfig = FaultConfig()


class DeviceConfig(Section):
    """Which device runs the model."""

    kind: Literal["auto", "npu", "emulated"] = Field(
        "auto", description="auto uses a real NPU if one answers, else the emulator"
    )
    task_queue: Literal[0, 1] | None = Field(
        None,
        description="torch_npu's TASK_QUEUE_ENABLE: 1 dispatches operators from a second "
        "thread; null is 1 on NPUs, and 0 on the emulator, where that thread has no core of its "
        "own",
    )
    expandable_segments: bool | None = Field(
        None,
        description="let torch_npu's allocator grow its segments, against fragmentation; null "
        "is true only on NPUs",
    )
    bind_cores: Literal["auto", "off"] = Field(
        "auto",
        description="auto binds the rank of an NPU to its share of the host's cores, those of the "
        "NPU's NUMA node, if there are five for each NPU; ranks on the emulator are not bound",
    )
    deterministic: bool | None = Field(
        None,
        description="sum in a fixed order in collectives (HCCL_DETERMINISTIC), which makes "
        "them slower. null does so if several ranks run the same tokens (tp, pcp) and each rank "
        "decides independently what must be the same on all: with experts, and with drafts",
    )
    hccl_expansion: HcclExpansion | None = Field(
        None,
        description="the processor that unrolls a collective: vector cores, AI CPU, or the "
        "host with FFTS+; it determines the streams of communication. null leaves it to HCCL, "
        "and plans with the documented mode of the chip: AICPU on an A3, FFTS on an A2",
    )
    hccl_buffer_mb: int = Field(
        200,
        ge=1,
        le=65536,
        description="HCCL's buffer of every communication domain but MC2's",
    )
    mc2_buffer_mb: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="HCCL's buffer of MC2's own domain, which gets it by HCCL_BUFFSIZE; batches "
        "that exceed it use another way. null is the need of MC2's largest batch",
    )
    hccl_interfaces: str | None = Field(
        None,
        min_length=1,
        description="network interfaces of HCCL between nodes (HCCL_SOCKET_IFNAME), e.g. eth0, "
        "or =eth0 for exactly this one, or ^docker for all others; null uses Ray's address of "
        "the node (HCCL_IF_IP) if a group spans nodes. For all of these variables, the "
        "environment of a node's `ray start` overrides the keys",
    )
    hccl_host_ports: str | None = Field(
        None,
        pattern=PORTS,
        description="ports of HCCL on the host (HCCL_HOST_SOCKET_PORT_RANGE), e.g. "
        "60000-60050, or auto; several ranks on a node need one port each",
    )
    hccl_npu_ports: str | None = Field(
        None,
        pattern=PORTS,
        description="the same for ports of HCCL on the NPU (HCCL_NPU_SOCKET_PORT_RANGE)",
    )
    gloo_interface: str | None = Field(
        None,
        min_length=1,
        description="network interface of Gloo (GLOO_SOCKET_IFNAME), e.g. eth0, for other "
        "libraries; this runtime makes no groups of Gloo",
    )
    soc: str | None = Field(
        None,
        description="name of the chip that plans assume, e.g. Ascend910B1 (an A2) or "
        "Ascend910_9391 (an A3); the emulator emulates that chip, too. A plan for an unknown chip "
        "needs memory_mb, and assumes an A2. null asks the first NPU of this machine, and means an "
        "A2 without an NPU",
    )
    cann: str | None = Field(
        None,
        pattern=r"^[0-9]+\.[0-9]+",
        description="version of CANN that plans for NPUs assume; null asks the same NPU, and "
        "means 9.1.0 without one",
    )
    memory_mb: int | None = Field(
        None,
        ge=16,
        description="memory of each NPU that plans assume; null asks the same NPU, and without "
        "one means what torch reports on such a chip: 60.96 GiB of 64 GB, 29.5 GiB of an "
        "Ascend910B4's 32 GB",
    )
    emulator: EmulatorConfig = EmulatorConfig()

    @property
    def chip(self) -> str:
        """The chip that plans assume."""
        return self.soc or (ANY_A2 if self.kind == "npu" else self.emulator.soc)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The keys about the NPU that neither the configuration nor an NPU has filled."""
        return tuple(key for key in ("soc", "cann", "memory_mb") if getattr(self, key) is None)

    @property
    def npu_cann(self) -> str:
        """The version of CANN that plans for NPUs assume."""
        return self.cann or ASSUMED_CANN

    @property
    def npu_bytes(self) -> int:
        """The memory of an NPU that plans assume."""
        family = family_of(self.chip)
        return (self.memory_mb or (family.memory_mb if family else DIE_64_GB_MB)) << 20

    @property
    def assumed(self) -> str:
        """The assumptions of plans about each NPU, in words."""
        gib = f"{self.npu_bytes / (1 << 30):.4g} GiB"
        return f"each NPU is an {self.chip} with {gib} under CANN {self.npu_cann}"

    @property
    def expansion(self) -> HcclExpansion:
        """The processor that unrolls collectives, as plans assume."""
        return self.hccl_expansion or ("AICPU" if generation_of(self.chip) == "A3" else "FFTS")
