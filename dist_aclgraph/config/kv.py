"""The configuration keys of the KV cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
    events: KVEventsConfig = KVEventsConfig()

    @property
    def keeps_copies(self) -> bool:
        """Whether copies of KV blocks are kept outside the device."""
        return self.host_gib > 0 or self.disk is not None
