"""The configuration keys for the KV cache."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dist_aclgraph.config.kv_events import KVEventsConfig
from dist_aclgraph.config.section import Section


class KVConfig(Section):
    """The paged KV cache."""

    block_size: int = Field(128, ge=16, le=1024, multiple_of=16, description="tokens per KV block")
    num_blocks: int | None = Field(
        None,
        ge=2,
        description="KV blocks per rank; null derives the number from the free device memory",
    )
    memory_fraction: float = Field(
        0.9,
        gt=0.0,
        le=0.98,
        description="KV blocks get this share of the device memory that weights, buffers, graphs "
        "and eager steps do not need",
    )
    max_bytes: int = Field(
        1 << 40, ge=1 << 16, description="upper limit of the bytes of KV blocks per rank"
    )
    dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="type of cached keys: auto is that of the key `dtype`. int8 is possible only "
        "with latent attention (DeepSeek, Kimi K2, GLM-5): latents are stored in int8, with a "
        "scale for each 128 values",
    )
    checkpoints: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="for models with linear attention: copies of states per rank, from which "
        "prompts with an equal prefix start; null gives as many as scheduler.max_num_seqs",
    )
    checkpoint_interval: int = Field(
        512,
        ge=1,
        description="tokens between two checkpoints of a prompt, rounded up to whole blocks",
    )
    host_gib: float = Field(
        0.0,
        ge=0.0,
        le=1 << 20,
        description="GiB of each node's memory for copies of KV blocks. All groups of a node share "
        "these copies. A prompt reads its blocks from them after the NPU's cache has evicted the "
        "blocks, or after their group was lost. 0 keeps no copies",
    )
    host_path: str = Field(
        "/dev/shm",
        description="folder of a file system in memory, for kv.host_gib. The copies are deleted "
        "when the last group of the node is stopped",
    )
    disk: str | None = Field(
        None,
        description="folder on each node's disk for copies of KV blocks. The copies stay after the "
        "end of the service. If kv.host_gib is also set, a block is written to memory first, and "
        "then to the disk",
    )
    disk_gib: float = Field(
        64.0, gt=0.0, le=1 << 20, description="maximum size of the files in kv.disk, in GiB"
    )
    transport: Literal["sockets", "hixl"] = Field(
        "sockets",
        description="how groups on different nodes fetch copies of KV blocks from each other. "
        "sockets: over encrypted connections. hixl: devices read the memory of other nodes, "
        "without encryption; this needs kv.closed_network, and CANN's Python package hixl",
    )
    closed_network: bool = Field(
        False,
        description="only machines and users that you trust reach the network between the nodes. "
        "kv.transport=hixl needs this, because everyone who reaches its ports can read and change "
        "KV of requests",
    )
    peers_key_file: str | None = Field(
        None,
        description="file with a secret key, at the same path on every node, with mode 0600. "
        "Services with the same key fetch copies of KV blocks from each other, if a router sends "
        "them kv_transfer_params",
    )
    peers_host: str | None = Field(
        None,
        description="address of this machine at which other services fetch copies of KV blocks, "
        "for a service whose groups have one node each. null uses the address with which the node "
        "joined Ray, which is loopback for a Ray that the service has started",
    )
    events: KVEventsConfig = KVEventsConfig()

    @model_validator(mode="after")
    def _check_transport(self) -> KVConfig:
        if self.transport == "hixl" and not self.closed_network:
            raise ValueError(
                "kv.transport is hixl, with which everyone who reaches the nodes' ports can read "
                "and change KV of requests: set kv.closed_network to true if only trusted machines "
                "reach this network, or set kv.transport to sockets"
            )
        if self.closed_network and self.transport != "hixl":
            raise ValueError(
                f"kv.closed_network is true, but has no effect with kv.transport "
                f"{self.transport}: set kv.transport to hixl, or remove kv.closed_network"
            )
        return self

    @field_validator("peers_host")
    @classmethod
    def _check_peers_host(cls, host: str | None) -> str | None:
        if host is None:
            return None
        try:
            address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            address = None
        if address is None or address.is_unspecified:
            raise ValueError(
                f"peers_host is {host!r}; other services connect to it, so it must be one address "
                "of this machine, such as 10.0.0.5"
            )
        return str(address)

    @model_validator(mode="after")
    def _check_peers(self) -> KVConfig:
        path = self.peers_key_file
        if path is None:
            if self.peers_host is not None:
                raise ValueError(
                    f"kv.peers_host is {self.peers_host}, but has no effect without "
                    "kv.peers_key_file: set both, or remove kv.peers_host"
                )
            return self
        if not path.startswith("/"):
            raise ValueError(
                f"kv.peers_key_file is {path!r}; it must be an absolute path, because processes on "
                "all nodes read it"
            )
        if not self.keeps_copies:
            raise ValueError(
                "kv.peers_key_file lets other services fetch copies of KV blocks, but no copies "
                "are kept: set kv.host_gib or kv.disk, or remove kv.peers_key_file"
            )
        if self.transport != "sockets":
            raise ValueError(
                f"kv.transport is {self.transport}, but with kv.peers_key_file, services fetch "
                "over encrypted connections: set kv.transport to sockets, or remove "
                "kv.peers_key_file"
            )
        return self

    @property
    def keeps_copies(self) -> bool:
        """Whether copies of KV blocks are kept outside the device."""
        return self.host_gib > 0 or self.disk is not None
