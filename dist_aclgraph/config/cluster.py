"""The configuration keys for a cluster of several nodes."""

from __future__ import annotations

from pydantic import Field, field_validator

from dist_aclgraph.config.ports import PORTS_PATTERN, check_ports, read_ports
from dist_aclgraph.config.section import Section


class ClusterConfig(Section):
    """The nodes of the Ray cluster on which a deployment runs, and how these nodes reach each
    other.
    """

    labels: dict[str, str] = Field(
        default_factory=dict,
        description="workers run only on nodes with these Ray labels, e.g. {rack: r1} for nodes "
        "that were started with `ray start --labels=rack=r1`. Without labels, every "
        "node is accepted",
    )
    ports: str | None = Field(
        None,
        pattern=PORTS_PATTERN,
        description="TCP ports for connections between nodes, e.g. 20000-20100. The first node of "
        "each lockstep group uses up to five of these ports; with "
        "parallel.prefill_groups or kv.peers_key_file, each other node of a group uses one. With "
        "kv.transport=hixl, each node uses one more for each data-parallel rank that has workers "
        "there. null means any free port. HCCL has separate ports: device.hccl_host_ports and "
        "device.hccl_npu_ports",
    )

    _check_ports = field_validator("ports")(check_ports)

    @property
    def port_range(self) -> range | None:
        """The range of ports that the key ``ports`` describes; None means any free port."""
        return read_ports(self.ports)
