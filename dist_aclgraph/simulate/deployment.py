"""A deployment whose devices nobody asked: what its ranks would offer, and what they would plan.

The numbers of such devices are assumptions, and ``assumptions`` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dist_aclgraph.config import Config, GraphMode
from dist_aclgraph.environment import launch_blocking
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.planning.buckets import candidate_families, lazy_families
from dist_aclgraph.planning.budget import (
    BudgetModel,
    StreamOffer,
    Workload,
    make_budget_model,
    max_piecewise_sizes,
    streams_per_domain,
)
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.memory import GIB, RankMemory
from dist_aclgraph.planning.modes import with_possible_mode
from dist_aclgraph.planning.negotiation import keep_room, negotiate
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.traffic import Traffic
from dist_aclgraph.shapes.model_facts import ModelFacts, check_model, read_model_facts
from dist_aclgraph.shapes.model_spec import ModelSpec, read_model_spec
from dist_aclgraph.topology import ParallelLayout

NPU_STREAMS = 2048
NPU_STREAMS_TAKEN = 69  # before anything is joined: 1979 were left on a 910C with CANN 9.0
EMULATOR_STREAMS_TAKEN = 34  # those of torch_npu and the runner, counted on the emulator
NPU_BYTES = 64 << 30
NPU_CHIP = "Ascend910B"


@dataclass(frozen=True)
class NegotiatedPlan:
    """A plan, the offers it was made of with room kept for lazy graphs, and how many those are."""

    plan: GraphPlan
    offers: list[StreamOffer]
    lazy_capacity: int


@dataclass(frozen=True)
class AssumedDeployment:
    """What is known of a deployment before any device is.

    Attributes:
        config: with a graph mode that the model can have; ``mode_reasons`` say what was changed.
        memory: of the poorest rank.
        unknown_shape: why weights are not priced by the decoder's shape; "" where they are.
        offers: of all ranks, in their order.
        exchange: how tokens travel to experts of other ranks.
    """

    config: Config
    mode_reasons: tuple[str, ...]
    facts: ModelFacts
    layout: ParallelLayout
    workload: Workload
    budget_model: BudgetModel
    memory: RankMemory
    unknown_shape: str
    offers: list[StreamOffer]
    exchange: ExchangeRule

    @classmethod
    def from_config(cls, config: Config) -> AssumedDeployment:
        """Read the model's facts and assume its devices.

        Raises:
            ConfigError: the model's directory is missing or not a checkpoint, sizes do not match,
                the wanted exchange is not to be had, or a device does not hold weights and buffers.
        """
        facts = read_model_facts(config.model)
        check_model(config, facts)
        config, reasons = with_possible_mode(config, facts, launch_blocking=launch_blocking())
        layout = ParallelLayout.from_config(config.parallel)
        workload = Workload.from_config(config, facts)
        spec, unknown_shape = _read_shape(config.model)
        ranks = range(layout.world_size)
        memory = RankMemory.from_config(
            config,
            facts,
            spec,
            min(_device_bytes(config, rank) for rank in ranks),
            has_hccl_buffers=config.device.kind == "npu",
        )
        memory.check(config)
        offers = [_offer(config, workload, rank, memory.taken_bytes) for rank in ranks]
        return cls(
            config,
            reasons,
            facts,
            layout,
            workload,
            make_budget_model(config.graph.budget_model),
            memory,
            unknown_shape,
            offers,
            ExchangeRule.from_config(config, facts, _chip(config)),
        )

    def with_mode(self, mode: GraphMode) -> AssumedDeployment:
        """Return the same deployment in another graph mode."""
        graph = self.config.graph.model_copy(update={"mode": mode})
        return self.from_config(self.config.model_copy(update={"graph": graph}))

    def negotiate(self, offers: Sequence[StreamOffer]) -> NegotiatedPlan:
        """Negotiate one plan over offers, as a deployment would.

        Raises:
            StreamBudgetError: a rank cannot afford a single bucket.
        """
        config, model, workload = self.config, self.budget_model, self.workload
        lazy, capacity = lazy_families(config), config.graph.lazy_capacity
        # Ranks that offer the same limit a plan alike: the first of them speaks for all.
        first_of = {content_of(offer): offer for offer in reversed(offers)}
        kept, capacity = keep_room(list(first_of.values()), lazy, capacity, model, workload)
        plan = negotiate(
            kept,
            candidate_families(config),
            model,
            workload,
            traffic=Traffic.from_config(config.graph),
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        reserve_of = {key: offer.reserve for key, offer in zip(first_of, kept, strict=True)}
        return NegotiatedPlan(
            plan,
            [
                msgspec.structs.replace(offer, reserve=reserve_of[content_of(offer)])
                for offer in offers
            ],
            capacity,
        )

    @property
    def cache_spec(self) -> KVCacheSpec:
        """The KV cache of one rank."""
        return KVCacheSpec.from_config(self.config, self.facts)

    def graph_bytes(self, pool_bytes: int) -> int:
        """Return what graphs take: ``pool_bytes``, or an estimate where that is 0 for unknown."""
        if self.config.graph.mode == "NONE":
            return 0
        return pool_bytes or self.memory.graph_bytes

    def num_blocks(self, pool_bytes: int) -> int:
        """Return the KV blocks of a rank whose graphs take so many bytes; 0: not predicted.

        Raises:
            ConfigError: too few fit, see ``KVCacheSpec.choose_num_blocks``.
        """
        free_bytes = max(0, self.memory.free_bytes - self.graph_bytes(pool_bytes))
        return self.cache_spec.choose_num_blocks(self.config, free_bytes, self.max_model_len)

    @property
    def max_model_len(self) -> int:
        """The longest request that the configuration allows.

        Raises:
            ConfigError: it exceeds the model's context.
        """
        wanted, context = self.config.max_model_len, self.facts.max_position_embeddings
        if wanted is not None and wanted > context:
            raise ConfigError(f"max_model_len is {wanted}; the model's context is {context} tokens")
        return wanted or context

    @property
    def assumptions(self) -> list[str]:
        """What was assumed of the devices, in sentences."""
        shape = []
        if self.unknown_shape:
            shape = [
                "weights take what the checkpoint's files do over tp, and graphs nothing: "
                f"{self.unknown_shape}"
            ]
        if self.config.device.kind == "npu":
            chip = [f"each NPU is an {_chip(self.config)}; MC2 has other limits on others"]
            return [
                *shape,
                f"each NPU has {NPU_STREAMS} streams and {NPU_BYTES // GIB} GiB; the runtime and "
                f"its communication domains take {NPU_STREAMS_TAKEN} streams and what HCCL's "
                "expansion mode costs, nobody else takes any",
                "no device was asked; a running deployment negotiates over what they really have",
                *(chip if self.config.parallel.ep > 1 else []),
            ]
        return [
            *shape,
            "every rank has the streams and the memory of device.emulator; the runtime takes "
            f"{EMULATOR_STREAMS_TAKEN} streams",
        ]


def distinct(offers: Iterable[StreamOffer]) -> list[StreamOffer]:
    """Return the offers that differ in more than their rank, of equal ones the first."""
    found: dict[bytes, StreamOffer] = {}
    for offer in offers:
        found.setdefault(content_of(offer), offer)
    return list(found.values())


def content_of(offer: StreamOffer) -> bytes:
    """Return what equal offers of two ranks have in common."""
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, rank=0))


def _read_shape(model: str) -> tuple[ModelSpec | None, str]:
    """Return the decoder's shape, or None and why there is none."""
    try:
        return read_model_spec(model), ""
    except ModelError as e:
        return None, str(e)


def _chip(config: Config) -> str:
    device = config.device
    return (device.soc or NPU_CHIP) if device.kind == "npu" else device.emulator.soc


def _offer(config: Config, workload: Workload, rank: int, taken_bytes: int) -> StreamOffer:
    emulator = config.device.emulator
    is_npu = config.device.kind == "npu"
    streams = NPU_STREAMS if is_npu else emulator.streams_by_rank.get(rank, emulator.streams)
    taken = {
        "torch_npu and runner": NPU_STREAMS_TAKEN if is_npu else EMULATOR_STREAMS_TAKEN,
        "communication domains": sum(
            streams_per_domain(workload.expansion, domain.num_ranks) for domain in workload.domains
        ),
    }
    device = "NPU" if is_npu else f"emulated {emulator.soc}"
    return StreamOffer(
        rank=rank,
        available=max(0, streams - sum(taken.values())),
        taken={who: count for who, count in taken.items() if count},
        reserve=config.graph.reserve_streams,
        free_bytes=max(0, _device_bytes(config, rank) - taken_bytes),
        device=device,
        max_sizes=max_piecewise_sizes(device),
    )


def _device_bytes(config: Config, rank: int) -> int:
    if config.device.kind == "npu":
        return NPU_BYTES
    emulator = config.device.emulator
    return emulator.memory_mb_by_rank.get(rank, emulator.memory_mb) << 20
