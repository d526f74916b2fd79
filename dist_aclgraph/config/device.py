"""The configuration keys for the device: the chip, CANN, and the emulated NPU."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from dist_aclgraph.config.chips import DIE_64_GB_MB, NODE_NPUS, family_of, generation_of
from dist_aclgraph.config.section import Section

HcclExpansion = Literal["AIV", "AICPU", "FFTS"]
FusionName = Literal[
    "norm_quant",
    "swiglu_quant",
    "routing_quant",
    "expert_swiglu_quant",
    "nz_weights",
    "latent_prologue",
]
ANY_A2 = "Ascend910B"  # placeholder until the name of the chip is known
ASSUMED_CANN = "9.1.0"  # the newest CANN for which a version of torch_npu is published
# CANN finds its version by ASCEND_HOME_PATH, which CANN's set_env.sh sets.
UNKNOWN_CANN = "of unknown version, as where ASCEND_HOME_PATH is not set"
PORTS = r"^(auto|[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*)$"


FaultKind = Literal["fail", "stall", "die", "link", "remote", "retry", "memory", "ecc", "uce"]


class FaultConfig(Section):
    """A fault that the emulator injects, for tests."""

    op: str = Field(
        "",
        description="where the fault happens: an operator, e.g. aclnnMm or HcclAllReduce; alloc, "
        "which is an allocation of device memory in a capture; or a call, "
        "aclrtDeviceTaskAbort or HcclCommResume",
    )
    when: Literal["execute", "capture"] = Field(
        "execute",
        description="which calls are counted: executions (replays included), or "
        "recordings in a capture",
    )
    call: int = Field(1, ge=1, description="number of the call at which the fault happens")
    kind: FaultKind = Field(
        "fail",
        description="effect of the fault. die ends the process like kill -9. link and all kinds "
        "after link stop the device with the error of that name. With uce, device "
        "memory turns bad, and a task that uses this memory stops the device",
    )
    rank: int | None = Field(
        None, ge=0, description="world rank of the fault; null means all ranks"
    )
    stall_s: float = Field(60.0, gt=0, description="duration of a stall in seconds")
    operand: int = Field(
        0, ge=0, description="kind uce: index of the operator's tensor whose memory turns bad"
    )
    offset: int = Field(
        0, ge=0, description="kind uce: offset of the bad memory from the tensor's start, in bytes"
    )
    file: str = Field(
        "",
        description="path of a file. If you create this file, the fault that it describes happens "
        "in a worker that already runs. The file contains words such as fault_op=aclnnMm "
        "fault_kind=stall (see emulator/README.md). The worker with the fault removes the file",
    )


class EmulatorConfig(Section):
    """The emulated NPU. These keys have no effect on hardware."""

    strict: bool = Field(
        True,
        description="refuse arguments that the real operators refuse "
        "according to their documentation",
    )
    trace: bool = Field(False, description="print every launch and every error to the worker's log")
    streams: int = Field(2048, ge=1, le=65536, description="number of stream ids of one device")
    streams_by_rank: dict[int, int] = Field(
        default_factory=dict,
        description="number of stream ids for individual world ranks that differ from `streams`",
    )
    memory_mb: int = Field(
        4096,
        ge=16,
        description="device memory in MiB; the memory is counted, but not reserved on the host",
    )
    memory_mb_by_rank: dict[int, int] = Field(
        default_factory=dict,
        description="device memory in MiB for individual world ranks that differ from `memory_mb`",
    )
    kernels: Literal["compute", "skip", "timed"] = Field(
        "compute",
        description="compute runs all arithmetic. skip leaves out arithmetic, so that only host "
        "time is measured. timed leaves out arithmetic, too, and keeps the device "
        "busy for the modelled time of a chip (docs/develop/device-time.md)",
    )
    choices: int = Field(
        1,
        ge=1,
        description="with kernels skip or timed, argmax chooses at random among this number of "
        "tokens. So on average one of this number of drafts is accepted; with 1, "
        "every draft is accepted",
    )
    rates: str | None = Field(
        None,
        description="YAML or JSON file with rates for kernels timed. The rates have the names of "
        "docs/develop/device-time.md, and replace the rates in that table",
    )
    rules: str | None = Field(
        None,
        description="file with the rules of a real device, made by `dist-aclgraph probe "
        "--compare`. The settings in this file replace the emulator's settings",
    )
    accounting: Literal["pinned", "software_sq"] = Field(
        "pinned",
        description="how captured graphs use streams: pinned as with old drivers, software_sq as "
        "with new drivers",
    )
    soc: str = Field("Ascend910B1", description="name of the chip; device.soc overrides it")
    cann: str = Field(
        ASSUMED_CANN,
        pattern=r"^(8\.5|9\.[0-9]+)\.[0-9]+$",
        description="version of CANN whose rules the operators follow: 8.5.0, 8.5.1, 9.0 or 9.1",
    )
    wait_s: int = Field(60, ge=1, description="limit in seconds of a wait on the device")
    fault: FaultConfig = FaultConfig()
    second_fault: FaultConfig = FaultConfig()

    @property
    def checks_data(self) -> bool:
        """Whether the emulated operators raise an error for invalid values in tensors."""
        return self.strict and self.kernels == "compute"


class DeviceConfig(Section):
    """Which device runs the model."""

    kind: Literal["auto", "npu", "emulated"] = Field(
        "auto", description="auto uses a real NPU if an NPU answers, otherwise the emulator"
    )
    task_queue: Literal[0, 1] | None = Field(
        None,
        description="torch_npu's TASK_QUEUE_ENABLE: with 1, a second thread dispatches operators. "
        "null means 1 on NPUs, and 0 on the emulator, where the second thread has no "
        "separate core",
    )
    expandable_segments: bool | None = Field(
        None,
        description="let torch_npu's allocator grow its segments, to avoid fragmentation; null "
        "means true on NPUs and false on the emulator",
    )
    bind_cores: Literal["auto", "off"] = Field(
        "auto",
        description="auto binds each NPU's rank to a part of the cores of the NPU's NUMA node, if "
        "there are five cores for each NPU and the rank may use all cores of the host. "
        "Ranks on the emulator are not bound",
    )
    deterministic: bool | None = Field(
        None,
        description="collectives sum in a fixed order (HCCL_DETERMINISTIC); this makes "
        "collectives slower. null means true if several ranks run the same tokens "
        "(tp, pcp) and each of them must independently come to the same decision, as "
        "with experts or drafts",
    )
    fusions: Literal["auto", "none"] | tuple[FusionName, ...] = Field(
        "auto",
        description="fused operators of int8 layers: norm_quant quantises the result of a norm, "
        "swiglu_quant the result of SwiGLU, routing_quant the rows of experts while they are "
        "sorted (not in steps that use MC2, which sorts while it sends), expert_swiglu_quant "
        "computes the products of gate and up of experts, SwiGLU and its quantisation. With "
        "nz_weights, int8 weights have the format that the cube unit reads (FRACTAL_NZ). "
        "latent_prologue computes the queries of latent attention and writes its cache. auto "
        "uses each of them where chip, CANN, torch_npu, dtype and widths allow it; none uses none "
        "of them; a list uses only those in it. Results differ from those of separate operators "
        "by roundings, but do not depend on nz_weights. The report of a start shows which are "
        "used, and why others are not",
    )
    hccl_expansion: HcclExpansion | None = Field(
        None,
        description="processor that unrolls a collective: vector cores (AIV), AI CPU (AICPU), or "
        "the host with FFTS+ (FFTS). The number of streams for communication depends "
        "on this processor. With null, HCCL chooses the processor, and plans assume "
        "the documented mode of the chip: AICPU on an A3, FFTS on an A2",
    )
    hccl_buffer_mb: int = Field(
        200,
        ge=1,
        le=65536,
        description="size in MB of HCCL's buffer for each communication domain except MC2's domain",
    )
    mc2_buffer_mb: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="size in MB of HCCL's buffer for MC2's domain, set by HCCL_BUFFSIZE. Batches "
        "that need a larger buffer use another exchange. null means the size that "
        "MC2's largest batch needs",
    )
    hccl_interfaces: str | None = Field(
        None,
        min_length=1,
        description="network interfaces of HCCL between nodes (HCCL_SOCKET_IFNAME): eth0 for names "
        "that begin with eth0, =eth0 for exactly this name, ^docker for all names that "
        "do not begin with docker. With null, HCCL uses Ray's address of the node "
        "(HCCL_IF_IP) if a group spans nodes. Variables in the environment of a node's "
        "`ray start` override this key, hccl_host_ports, hccl_npu_ports and "
        "gloo_interface",
    )
    hccl_host_ports: str | None = Field(
        None,
        pattern=PORTS,
        description="ports of HCCL on the host (HCCL_HOST_SOCKET_PORT_RANGE), e.g. 60000-60050, "
        "or auto. Each rank on a node needs one port",
    )
    hccl_npu_ports: str | None = Field(
        None,
        pattern=PORTS,
        description="ports of HCCL on the NPU (HCCL_NPU_SOCKET_PORT_RANGE), in the form of "
        "hccl_host_ports",
    )
    gloo_interface: str | None = Field(
        None,
        min_length=1,
        description="network interface of Gloo (GLOO_SOCKET_IFNAME), e.g. eth0. Only other "
        "libraries use it, because this runtime creates no Gloo groups",
    )
    soc: str | None = Field(
        None,
        description="name of the chip that plans assume and that the emulator emulates, e.g. "
        "Ascend910B1 (an A2) or Ascend910_9391 (an A3). A plan for an unknown chip "
        "assumes an A2, and needs memory_mb. null means the chip of the first NPU of "
        "this machine, or an A2 if this machine has no NPU",
    )
    cann: str | None = Field(
        None,
        pattern=r"^([0-9]+\.[0-9]+.*)?$",
        description="version of CANN that plans for NPUs assume; null means the version on this "
        "machine's first NPU, or 9.1.0 if this machine has no NPU. If the NPU does not report a "
        "version, this key is empty, and the stricter limits of older versions apply",
    )
    memory_mb: int | None = Field(
        None,
        ge=16,
        description="memory in MiB that plans assume for each NPU. null means the memory of the "
        "first NPU of this machine. If this machine has no NPU, null means the memory "
        "that torch reports on the assumed chip: 60.96 GiB on a chip of 64 GB, 29.5 "
        "GiB on an Ascend910B4 of 32 GB",
    )
    node_npus: int | None = Field(
        None,
        ge=1,
        description="number of NPUs of each node that plans assume. null means the number of this "
        "machine's NPUs, but at least the number of a usual server: 8 on an A2, 16 on an A3",
    )
    emulator: EmulatorConfig = EmulatorConfig()

    @field_validator("fusions", mode="before")
    @classmethod
    def _check_fusions(cls, value: Any) -> Any:
        # Without this check, pydantic's error would contain the key's type instead of the key's
        # name.
        known = get_args(FusionName)
        is_list = isinstance(value, list | tuple) and all(name in known for name in value)
        if is_list or value in ("auto", "none"):
            return value
        raise ValueError(
            f"must be auto, none or a list such as [{known[0]}]; known are {', '.join(known)}"
        )

    @property
    def npus_of_node(self) -> int:
        """The number of NPUs that plans assume on each node."""
        family = family_of(self.chip)
        return self.node_npus or (family.node_npus if family else NODE_NPUS)

    @property
    def chip(self) -> str:
        """The name of the chip that plans assume."""
        return self.soc or (ANY_A2 if self.kind == "npu" else self.emulator.soc)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The keys of the NPU's properties that still have no value: neither the user nor an NPU
        has set them.
        """
        return tuple(key for key in ("soc", "cann", "memory_mb") if getattr(self, key) is None)

    @property
    def npu_cann(self) -> str:
        """The version of CANN that plans assume for NPUs; "" if the NPU does not report it."""
        return ASSUMED_CANN if self.cann is None else self.cann

    @property
    def npu_bytes(self) -> int:
        """The bytes of memory that plans assume on each NPU."""
        family = family_of(self.chip)
        return (self.memory_mb or (family.memory_mb if family else DIE_64_GB_MB)) << 20

    @property
    def assumed(self) -> str:
        """A text that describes what plans assume about each NPU."""
        gib = f"{self.npu_bytes / (1 << 30):.4g} GiB"
        return f"each NPU is an {self.chip} with {gib} under CANN {self.npu_cann or UNKNOWN_CANN}"

    @property
    def expansion(self) -> HcclExpansion:
        """The configured processor that unrolls collectives, or the chip's default processor."""
        return self.hccl_expansion or ("AICPU" if generation_of(self.chip) == "A3" else "FFTS")
