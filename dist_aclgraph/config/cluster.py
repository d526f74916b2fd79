"""The configuration's keys of a cluster of several nodes."""

from __future__ import annotations

from pydantic import Field, field_validator

from dist_aclgraph.config.section import Section

MAX_PORT = 65535


class ClusterConfig(Section):
    """Where in the Ray cluster a deployment runs, and how its nodes reach each other."""

    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray labels that a node must have to get workers, e.g. {rack: r1} for "
        "nodes that `ray start --labels=rack=r1` has started; empty accepts every node",
    )
    ports: str | None = Field(
        None,
        pattern=r"^[0-9]{1,5}-[0-9]{1,5}$",
        description="TCP ports between nodes, e.g. 20000-20100; the first node of each "
        "lockstep group uses up to four of them. null uses any free port. HCCL has its own "
        "ports: device.hccl_host_ports and device.hccl_npu_ports",
    )

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, value: str | None) -> str | None:
        if value is not None:
            first, last = map(int, value.split("-"))
            if not 1 <= first <= last <= MAX_PORT:
                raise ValueError(f"must be FIRST-LAST, from 1 to {MAX_PORT}, e.g. 20000-20100")
        return value

    @property
    def port_range(self) -> range | None:
        """The ports to choose from; None means any free port."""
        if self.ports is None:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)
