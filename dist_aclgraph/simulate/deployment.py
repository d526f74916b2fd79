"""A deployment without devices: computes the resources that its ranks would offer for graphs, and
the resulting plan.

The properties of the devices are assumptions, which ``assumptions`` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dist_aclgraph.config import Config, GraphMode
from dist_aclgraph.config.chips import CHIP_FAMILIES, family_of
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.environment import launch_blocking
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.block_files import HEADER
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.tiers import DISK, GIB, HOST
from dist_aclgraph.planning.budget import (
    BudgetModel,
    StreamOffer,
    max_piecewise_sizes,
    reserved_streams,
    streams_per_domain,
)
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.memory import RankMemory
from dist_aclgraph.planning.planner import Planner, content_of
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.topology import ParallelLayout

NPU_STREAMS = 2048
# Number of streams that a 910C with CANN 9.0 uses before HCCL groups are formed, measured: 1979 of
# 2048 streams were free.
NPU_STREAMS_TAKEN = 69
# Number of streams that torch_npu and the runner use, counted on the emulator.
EMULATOR_STREAMS_TAKEN = 34


@dataclass(frozen=True)
class ContextRoom:
    """The capacity of a data parallel rank's KV cache.

    Attributes:
        bytes_per_token: average bytes of KV per token on each NPU of the rank.
        tokens: maximum number of tokens of all requests together.
        longest: maximum number of tokens of a single request, limited by the model's context
            length.
        requests: number of requests of length ``request_tokens`` that fit at the same time; see
            ``AssumedDeployment.room``.
    """

    bytes_per_token: float
    tokens: int
    longest: int
    requests: int


@dataclass(frozen=True)
class AssumedDeployment:
    """The facts about a deployment that are known or assumed before any device is opened.

    Attributes:
        planner: computes plans from configuration and model.
        memory: the memory account of the rank that has the least memory.
        offers: offers of all ranks, in the order of ranks.
        exchange: chooses how tokens are exchanged between ranks with different experts.
    """

    planner: Planner
    memory: RankMemory
    offers: list[StreamOffer]
    exchange: ExchangeRule

    @classmethod
    def from_config(cls, config: Config) -> AssumedDeployment:
        """Read the model's facts, and assume the devices of the configuration.

        Raises:
            ConfigError: the model's directory is missing or is no checkpoint; sizes do not match;
                the configured exchange is impossible; the chip is unknown; a node has too few NPUs
                for a tensor parallel group; or weights, buffers and eager steps do not fit in a
                device's memory.
        """
        _check_chip(config)
        _check_nodes(config)
        planner = Planner.from_config(config, launch_blocking=launch_blocking())
        config, facts = planner.config, planner.facts
        ranks = range(planner.layout.world_size)
        emulator = config.device.emulator
        is_npu = config.device.kind == "npu"
        chip = Chip(config.device.chip, config.device.npu_cann if is_npu else emulator.cann)
        if is_npu or emulator.strict:
            chip.check_attention(config, facts, "as plans assume")
        exchange = ExchangeRule.from_config(config, facts, chip)
        memory = RankMemory.from_config(
            config,
            facts,
            min(_device_bytes(config, rank) for rank in ranks),
            has_hccl_buffers=is_npu,
            mc2_buffer_mb=exchange.mc2_buffer_mb,
        )
        memory.check_fits(config)
        has_mc2 = exchange.mc2_buffer_mb is not None
        needed = memory.taken_bytes + memory.eager_bytes
        offers = [_offer(planner, rank, needed, has_mc2=has_mc2) for rank in ranks]
        return cls(planner, memory, offers, exchange)

    def with_mode(self, mode: GraphMode) -> AssumedDeployment:
        """Return a copy of this deployment with another graph mode."""
        graph = self.config.graph.model_copy(update={"mode": mode})
        return self.from_config(self.config.model_copy(update={"graph": graph}))

    @property
    def config(self) -> Config:
        """The configuration, in which an unsupported graph mode is replaced by a supported mode."""
        return self.planner.config

    @property
    def facts(self) -> ModelSpec:
        return self.planner.facts

    @property
    def layout(self) -> ParallelLayout:
        """The layout, including MC2's domain if MC2 is used."""
        has_mc2 = self.exchange.mc2_buffer_mb is not None
        return replace(self.planner.layout, mc2=has_mc2)

    @property
    def budget_model(self) -> BudgetModel:
        return self.planner.budget_model

    def graph_bytes(self, pool_bytes: int) -> int:
        """Return the bytes that a rank's graphs use: ``pool_bytes``, or an estimate if
        ``pool_bytes`` is 0.
        """
        if self.config.graph.mode == "NONE":
            return 0
        return pool_bytes or self.memory.graph_bytes

    def without_shared_context(self) -> AssumedDeployment:
        """Return a deployment on the same NPUs with dcp=1 and pcp=1, and more data parallel ranks.

        Raises:
            ConfigError: see ``from_config``.
        """
        parallel = self.config.parallel
        sizes = {"dp": parallel.dp * parallel.pcp, "pcp": 1, "dcp": 1}
        changed = {"parallel": parallel.model_copy(update=sizes)}
        return self.from_config(self.config.model_copy(update=changed))

    def room(self, pool_bytes: int, request_tokens: int) -> ContextRoom:
        """Return the capacity of a data parallel rank's KV cache.

        Args:
            pool_bytes: number of bytes that a rank's graphs use; 0 if unknown.
            request_tokens: number of tokens of a request, for ``ContextRoom.requests``.

        Raises:
            ConfigError: fewer than two blocks fit.
        """
        kv, spec = self.config.kv, self.planner.cache_spec
        free_bytes = max(0, self.memory.free_bytes - self.graph_bytes(pool_bytes))
        fitting = spec.blocks_that_fit(free_bytes, kv.memory_fraction, kv.max_bytes)
        num_blocks = kv.num_blocks or fitting
        return ContextRoom(
            bytes_per_token=spec.bytes_per_block / spec.tokens_per_block,
            tokens=(num_blocks - 1) * spec.tokens_per_block,
            longest=spec.longest_request(num_blocks, self.facts.context_len),
            requests=(num_blocks - 1) // spec.blocks_for(request_tokens),
        )

    def num_blocks(self, pool_bytes: int) -> int:
        """Return the number of KV blocks of a rank.

        Args:
            pool_bytes: number of bytes that the rank's graphs use; 0 if unknown.

        Raises:
            ConfigError: too few blocks fit, see ``KVCacheSpec.choose_num_blocks``.
        """
        free_bytes = max(0, self.memory.free_bytes - self.graph_bytes(pool_bytes))
        planner = self.planner
        return planner.cache_spec.choose_num_blocks(self.config, free_bytes, planner.max_model_len)

    @property
    def files_per_block(self) -> int:
        """Number of files that one node has for one KV block; 0 if no copies are kept. A data
        parallel rank writes one file for each part of a block. If the workers of a data parallel
        rank are on several nodes, the result is the maximum over these nodes.
        """
        ranks = range(self.layout.tp * self.layout.pcp)
        nodes = [str(rank // self.config.device.npus_of_node) for rank in ranks]
        files = GroupFiles.of(self.config, self.facts, nodes)
        if files is None:
            return 0
        return max(len({p.folder for p in files.places_beside(rank)}) for rank in ranks)

    @property
    def bytes_of_files(self) -> int:
        """Total size in bytes of the files that one node has for one block; see
        ``files_per_block``.
        """
        return self.files_per_block * (self.planner.cache_spec.bytes_per_block + HEADER.size)

    @property
    def copied_blocks(self) -> dict[str, int]:
        """Maps each tier's name to the number of blocks that fit in this tier of a node. A block
        needs ``bytes_of_files`` bytes. Empty if no copies are kept. Files with checkpoints of
        recurrent states are not counted.
        """
        kv, size = self.config.kv, self.bytes_of_files
        limits = {HOST: kv.host_gib, DISK: kv.disk_gib if kv.disk else 0.0}
        return {name: int(gib * GIB) // size for name, gib in limits.items() if size and gib}

    @property
    def states(self) -> dict[str, int] | None:
        """Number and size of the slots that each rank has for recurrent states; None if the model
        has no recurrent states.
        """
        spec = self.planner.cache_spec
        if not spec.states:
            return None
        slots = StateSlots.from_config(self.config)
        return {
            "num_slots": spec.num_slots,
            "bytes_per_slot": spec.bytes_per_slot,
            "bytes": spec.state_bytes,
            "num_requests": slots.num_rows,
            "slots_per_request": slots.num_places,
            "num_checkpoints": slots.num_checkpoints,
        }

    @property
    def assumptions(self) -> list[str]:
        """The assumptions about the devices, as sentences for users."""
        device = self.config.device
        found: list[str] = []
        if family_of(device.chip) is None:
            found.append(
                f"nothing is known about the chip {device.chip}: its streams, its HCCL and its "
                "operators are assumed to be those of an A2"
            )
        if device.kind == "npu":
            known = "as configured, or else as read from the first NPU of this machine"
            if unknown := device.unknown:
                keys = [f"device.{key}" for key in unknown]
                known = f"no NPU was asked for {', '.join(keys)}"
            return [
                *found,
                f"{device.assumed}: {known}",
                f"each NPU has {NPU_STREAMS} streams; the runtime and its communication domains "
                f"take {NPU_STREAMS_TAKEN} streams, HCCL's expansion mode takes more, and other "
                "processes take none; a deployment negotiates over the remaining streams",
            ]
        return [
            *found,
            "every rank has the streams and the memory of device.emulator; the runtime takes "
            f"{EMULATOR_STREAMS_TAKEN} streams",
        ]


def distinct(offers: Iterable[StreamOffer]) -> list[StreamOffer]:
    """Return offers without duplicates. If several offers differ only in their rank, only the first
    of them is returned.
    """
    found: dict[bytes, StreamOffer] = {}
    for offer in offers:
        found.setdefault(content_of(offer), offer)
    return list(found.values())


def _check_chip(config: Config) -> None:
    """Raise an error if the chip of the NPUs is unknown and ``device.memory_mb`` is not set."""
    device = config.device
    if device.kind != "npu" or device.memory_mb is not None or family_of(device.chip):
        return
    names = ", ".join(f"{family.prefix}... ({family.generation})" for family in CHIP_FAMILIES)
    raise ConfigError(
        f"device.soc is {device.chip}; plans know {names}: correct the name, or set "
        "device.memory_mb, too, and the plan assumes an A2 with that memory"
    )


def _check_nodes(config: Config) -> None:
    """Raise an error, as a real start does, if a tensor parallel group is too large for a node."""
    parallel, device = config.parallel, config.device
    if device.kind != "npu" or parallel.tp_across_nodes:
        return
    if parallel.tp > device.npus_of_node:
        raise ConfigError(
            f"parallel.tp is {parallel.tp}; plans assume {device.npus_of_node} NPUs of the chip "
            f"{device.chip} on each node: lower it, set device.node_npus if a node has more, or "
            "set parallel.tp_across_nodes=true if the links between nodes are those between the "
            "NPUs of one node"
        )


def _offer(planner: Planner, rank: int, needed_bytes: int, *, has_mc2: bool) -> StreamOffer:
    config, workload = planner.config, planner.budget_model.workload
    emulator = config.device.emulator
    is_npu = config.device.kind == "npu"
    streams = NPU_STREAMS if is_npu else emulator.streams_by_rank.get(rank, emulator.streams)
    sizes = [domain.num_ranks for domain in workload.domains]
    if has_mc2:
        sizes.append(config.parallel.ep)
    taken = {
        "torch_npu and runner": NPU_STREAMS_TAKEN if is_npu else EMULATOR_STREAMS_TAKEN,
        "communication domains": sum(streams_per_domain(workload.expansion, n) for n in sizes),
    }
    device = f"{'NPU' if is_npu else 'emulated'} {config.device.chip}"
    return StreamOffer(
        rank=rank,
        available=max(0, streams - sum(taken.values())),
        taken={who: count for who, count in taken.items() if count},
        reserve=reserved_streams(config),
        free_bytes=max(0, _device_bytes(config, rank) - needed_bytes),
        device=device,
        max_sizes=max_piecewise_sizes(device),
    )


def _device_bytes(config: Config, rank: int) -> int:
    if config.device.kind == "npu":
        return config.device.npu_bytes
    emulator = config.device.emulator
    return emulator.memory_mb_by_rank.get(rank, emulator.memory_mb) << 20
