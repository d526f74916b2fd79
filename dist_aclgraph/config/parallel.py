"""The configuration's keys of parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dist_aclgraph.config.section import Section

ExchangeSetting = Literal["auto", "all_gather", "all_to_all", "mc2"]
Mc2Algorithm = Literal["auto", "fullmesh", "hierarchy"]


class ParallelConfig(Section):
    """How the model is divided among NPUs."""

    tp: int = Field(
        1, ge=1, le=1024, description="tensor parallel size: number of NPUs that share each layer"
    )
    dp: int = Field(
        1,
        ge=1,
        le=4096,
        description="data parallel size: number of copies of the model. If ep spreads the "
        "experts, only attention is copied",
    )
    ep: int = Field(
        1,
        ge=1,
        le=4096,
        description="expert parallel size: number of ranks that share one set of experts. The "
        "value is a multiple of tp x pcp, or 1; it is 1 for dense models",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        le=4096,
        description="number of additional copies of experts. ep divides the number of the model's "
        "experts and copies together; a token uses one of the copies of its expert",
    )
    exchange: ExchangeSetting = Field(
        "auto",
        description="how tokens are sent to experts on other ranks. auto decides for each batch "
        "size; `dist-aclgraph plan` shows the decisions",
    )
    mc2_algorithm: Mc2Algorithm = Field(
        "auto",
        description="path of tokens in MC2's operators. fullmesh sends a token directly to the "
        "ranks of its experts. hierarchy sends a token first to the nodes of its "
        "experts, and then to the ranks within each node. hierarchy requires A2 "
        "chips, 16, 32 or 64 ranks of experts, eight of them on each node, and driver "
        "25.0.RC1.1 or newer. auto chooses hierarchy if the number of ranks and "
        "device.node_npus allow it",
    )
    expert_capacity: float = Field(
        2.0,
        ge=1.0,
        description="room for tokens in an all_to_all, as a multiple of the room that random "
        "routing needs. A step without enough room is run again with all_gather",
    )
    dcp: int = Field(
        1,
        ge=1,
        le=1024,
        description="decode context parallel size: number of shards of a request's KV cache. The "
        "shards are on ranks that would otherwise hold copies of this cache. The value "
        "is at most 16. It is 1, or pcp times a divisor of tp (with latent attention), "
        "or pcp times a divisor of tp / KV heads (with other attention)",
    )
    pcp: int = Field(
        1,
        ge=1,
        le=1024,
        description="prefill context parallel size: number of ranks that split each prompt. The "
        "deployment needs pcp times as many NPUs",
    )
    cp_interleave: int = Field(
        1,
        ge=1,
        description="number of consecutive tokens on the same dcp shard; must divide kv.block_size",
    )
    prefill_groups: int = Field(
        0,
        ge=0,
        le=4096,
        description="number of lockstep groups that compute long prompts for the other groups. The "
        "other groups read the prompts' KV from kv.host_gib or kv.disk, and generate the answers. "
        "0: every group does both",
    )
    prefill_from_tokens: int = Field(
        1024,
        ge=1,
        description="a prefill group computes a prompt if each of the other groups would have to "
        "compute at least this many of its tokens",
    )
    tp_across_nodes: bool = Field(
        False,
        description="let a tensor parallel group use several nodes if no node has enough NPUs. "
        "The ranks of such a group wait for each other twice per layer, over the "
        "network between the nodes",
    )

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pcp

    @property
    def num_lockstep_groups(self) -> int:
        """Number of lockstep groups: the ranks of one lockstep group run collectives together."""
        return self.world_size // max(self.ep, self.tp * self.pcp)
