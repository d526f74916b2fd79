"""What a deployment would capture and cache, computed without NPU, weights or Ray.

The numbers of a device that nobody asked are assumptions, and the report lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dist_aclgraph.config import Config, launch_blocking
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.graph.buckets import (
    GraphFamily,
    candidate_families,
    lazy_families,
    trim_sizes,
)
from dist_aclgraph.graph.budget import (
    BudgetModel,
    Price,
    StreamOffer,
    Workload,
    make_budget_model,
    max_piecewise_sizes,
    streams_per_domain,
    total,
)
from dist_aclgraph.graph.choice import padding_share
from dist_aclgraph.graph.ledger import Ledger, pool_bytes
from dist_aclgraph.graph.modes import with_possible_mode
from dist_aclgraph.graph.negotiation import keep_room, negotiate
from dist_aclgraph.graph.plan import GraphPlan
from dist_aclgraph.graph.traffic import Traffic, weights_of
from dist_aclgraph.kv.spec import KVCacheSpec, kv_heads_per_rank
from dist_aclgraph.model_facts import ModelFacts, read_model_facts
from dist_aclgraph.topology import ParallelLayout

NPU_STREAMS = 2048
NPU_STREAMS_TAKEN = 69  # before anything is joined: 1979 were left on a 910C with CANN 9.0
EMULATOR_STREAMS_TAKEN = 34  # those of torch_npu and the runner, counted on the emulator
NPU_BYTES = 64 << 30
GIB = 1 << 30
CHOSEN, ALL_SIZES, UNIFORM = "chosen", "all sizes", "as many, evenly by index"


def plan_report(config: Config) -> dict[str, Any]:
    """Return what the deployment would capture and why, as plain values (JSON-able).

    Raises:
        ConfigError: the model's directory is missing or not a checkpoint, or sizes do not match.
        StreamBudgetError: a rank cannot afford a single bucket.
    """
    facts = read_model_facts(config.model)
    config, mode_reasons = with_possible_mode(config, facts, launch_blocking=launch_blocking())
    layout = ParallelLayout.from_config(config.parallel)
    workload = Workload.from_config(config, facts)
    model = make_budget_model(config.graph.budget_model)
    spec = KVCacheSpec(
        num_layers=facts.num_layers,
        num_kv_heads=kv_heads_per_rank(facts.num_kv_heads, config.parallel.tp),
        head_size=facts.head_size,
        block_size=config.kv.block_size,
        dtype=config.dtype,
    )
    weight_bytes = facts.weight_bytes // config.parallel.tp
    offers = [_offer(config, workload, rank, weight_bytes) for rank in range(layout.world_size)]
    families = candidate_families(config)
    scopes = _plan_scopes(config, layout, offers, model, workload)
    offers = [offer for scope in scopes for offer in scope.offers]
    plans = [plan for scope in scopes for plan in [scope.plan] * scope.num_groups]
    pools = [pool_bytes(scope.plan, o, model, workload) for scope in scopes for o in scope.offers]
    num_blocks = spec.choose_num_blocks(
        config.kv,
        max(0, min(o.free_bytes - pool for o, pool in zip(offers, pools, strict=True))),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.max_model_len or facts.max_model_len,
    )
    return {
        "model": {"name": config.name, "path": config.model, **asdict(facts)},
        "layout": {
            **config.parallel.model_dump(),
            "world_size": layout.world_size,
            "lockstep_groups": [list(group) for group in layout.lockstep_groups],
        },
        "assumptions": _assumptions(config),
        "graph": {
            "mode": config.graph.mode,
            "mode_reasons": list(mode_reasons),
            "scope": config.graph.scope,
            "budget_model": model.name,
            "families": [_family_entry(f, model.price(f, workload, offers[0])) for f in families],
            "fixed_price": total(model.fixed(workload, offers[0])),
            "fixed_terms": _terms(model.fixed(workload, offers[0])),
            "traffic": _traffic_in_words(config),
            "lazy_capacity": min(scope.lazy_capacity for scope in scopes),
        },
        "plans": [_plan_entry(config, group, plan) for group, plan in enumerate(plans)],
        "ranks": [
            _rank_entry(offer, layout, plans[layout.lockstep_group_of(offer.rank)], model, workload)
            for offer in sorted(offers, key=lambda offer: offer.rank)
        ],
        "kv": {
            "block_size": spec.block_size,
            "bytes_per_block": spec.bytes_per_block,
            "num_blocks": num_blocks,
            "bytes": spec.total_bytes(num_blocks),
            "tokens": (num_blocks - 1) * spec.block_size,
            "max_model_len": _max_model_len(config, facts),
        },
    }


def render_plan(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    model, layout, graph, kv = (report[key] for key in ("model", "layout", "graph", "kv"))
    console.print(
        f"[bold]{model['name']}[/bold]: {model['architecture']}, {model['num_layers']} layers; "
        f"{layout['world_size']} NPUs (tp {layout['tp']}, dp {layout['dp']}) in "
        f"{len(layout['lockstep_groups'])} lockstep groups"
    )
    for sentence in report["assumptions"]:
        console.print(f"  assumed: {sentence}")
    for reason in graph["mode_reasons"]:
        console.print(reason)
    console.print(f"Graphs: {graph['mode']}, priced by {graph['budget_model']}")
    for family in graph["families"]:
        console.print(f"  {family['price_per_bucket']} streams for each {family['name']} bucket")
        _print_terms(family["terms"], console)
    console.print(f"  {graph['fixed_price']} streams fixed")
    _print_terms(graph["fixed_terms"], console)
    console.print(f"  streams are kept for {graph['lazy_capacity']} lazy graphs")
    for plan in report["plans"]:
        console.print(f"Group {plan['group']}: plan {plan['hash'][:12]}")
        for family in plan["families"]:
            buckets = ", ".join(map(str, family["buckets"]))
            console.print(f"  {family['name']} buckets {buckets}")
            shares = [
                f"{name} {found['padding_share']:.1%}" for name, found in family["sets"].items()
            ]
            console.print(f"    padding of {graph['traffic']}: {'; '.join(shares)}")
        for reason in plan["reasons"]:
            console.print(f"  {reason}")
    console.print(_rank_table(report["ranks"]))
    console.print(
        f"KV cache per NPU: {kv['num_blocks']} blocks of {kv['block_size']} tokens, "
        f"{kv['bytes_per_block']} bytes each, {kv['bytes'] / GIB:.2f} GiB in all; "
        f"{kv['tokens']} tokens, the longest request {kv['max_model_len']}"
    )


def _print_terms(terms: list[dict[str, Any]], console: Console) -> None:
    for term in terms:
        console.print(f"    {term['total']:5} {term['name']}: {term['why']}")


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    table = Table("rank", "group", "device", "offers", "captures", "costs", "left")
    for entry in ranks:
        table.add_row(
            str(entry["rank"]),
            str(entry["group"]),
            entry["device"],
            f"{entry['usable']} of {entry['available']} streams",
            f"{entry['num_buckets']} buckets",
            f"{entry['planned_streams']} streams",
            f"{entry['left_streams']} streams",
        )
    return table


@dataclass(frozen=True)
class _Scope:
    """Lockstep groups that share one plan, and their offers with room kept for lazy graphs."""

    plan: GraphPlan
    num_groups: int
    offers: list[StreamOffer]
    lazy_capacity: int


def _plan_scopes(
    config: Config,
    layout: ParallelLayout,
    offers: list[StreamOffer],
    model: BudgetModel,
    workload: Workload,
) -> list[_Scope]:
    """Negotiate one plan for all lockstep groups, or one for each, as a deployment would."""

    def negotiated(ranks: list[StreamOffer], num_groups: int) -> _Scope:
        lazy, capacity = lazy_families(config), config.graph.lazy_capacity
        kept, capacity = keep_room(ranks, lazy, capacity, model, workload)
        plan = negotiate(
            kept,
            candidate_families(config),
            model,
            workload,
            traffic=Traffic.from_config(config.graph),
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        return _Scope(plan, num_groups, kept, capacity)

    groups = layout.lockstep_groups
    if config.graph.scope == "cluster":
        return [negotiated(offers, len(groups))]
    return [negotiated([offers[rank] for rank in group], 1) for group in groups]


def _family_entry(family: GraphFamily, price: Price) -> dict[str, Any]:
    return {
        "name": family.name,
        "run_mode": family.run_mode,
        "query_len": family.query_len,
        "candidates": list(family.buckets),
        "price_per_bucket": total(price),
        "terms": _terms(price),
    }


def _terms(price: Price) -> list[dict[str, Any]]:
    return [{"name": term.label, "total": term.total, "why": term.why} for term in price]


def _plan_entry(config: Config, group: int, plan: GraphPlan) -> dict[str, Any]:
    candidates = candidate_families(config)
    weights = weights_of(Traffic.from_config(config.graph), candidates)
    return {
        "group": group,
        "version": plan.version,
        "hash": plan.hash,
        "families": [
            _chosen_entry(family, wanted, seen)
            for wanted, seen in zip(candidates, weights, strict=True)
            for family in plan.families
            if family.name == wanted.name
        ],
        "capture_order": [str(graph) for graph in plan.capture_order],
        "reasons": list(plan.reasons),
    }


def _chosen_entry(
    family: GraphFamily, wanted: GraphFamily, weights: Mapping[int, float]
) -> dict[str, Any]:
    """The chosen buckets; what traffic pads with them, with all sizes, and with uniform ones."""
    sets = {
        CHOSEN: family.buckets,
        ALL_SIZES: wanted.buckets,
        UNIFORM: tuple(trim_sizes(wanted.buckets, len(family.buckets))),
    }
    return {
        "name": family.name,
        "buckets": list(family.buckets),
        "sets": {
            name: {"buckets": list(buckets), "padding_share": padding_share(buckets, weights)}
            for name, buckets in sets.items()
        },
    }


def _rank_entry(
    offer: StreamOffer,
    layout: ParallelLayout,
    plan: GraphPlan,
    model: BudgetModel,
    workload: Workload,
) -> dict[str, Any]:
    ledger = Ledger.predict(offer, plan, model, workload)
    fixed = total(model.fixed(workload, offer)) if plan.families else 0
    streams = ledger.predicted_streams + fixed
    return {
        "rank": offer.rank,
        "group": layout.lockstep_group_of(offer.rank),
        "device": offer.device,
        "domains": [list(domain) for domain in layout.domains_of(offer.rank)],
        "available": offer.available,
        "taken": offer.taken,
        "reserve": offer.reserve,
        "usable": offer.usable,
        "free_bytes": offer.free_bytes,
        "num_buckets": plan.num_graphs,
        "prices": {e.term: e.predicted for e in ledger.entries if e.unit == "streams"},
        "planned_streams": streams,
        "pool_bytes": pool_bytes(plan, offer, model, workload) or None,  # None: not predicted
        "left_streams": offer.usable - streams,
    }


def _traffic_in_words(config: Config) -> str:
    if config.graph.traffic or config.graph.mixed_traffic:
        return "the configured traffic"
    return "traffic that nobody has seen yet, batches of n tokens weighing 1/n"


def _offer(config: Config, workload: Workload, rank: int, weight_bytes: int) -> StreamOffer:
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
        free_bytes=max(0, _device_bytes(config, rank) - weight_bytes),
        device=device,
        max_sizes=max_piecewise_sizes(device),
    )


def _device_bytes(config: Config, rank: int) -> int:
    if config.device.kind == "npu":
        return NPU_BYTES
    emulator = config.device.emulator
    return emulator.memory_mb_by_rank.get(rank, emulator.memory_mb) << 20


def _assumptions(config: Config) -> list[str]:
    if config.device.kind == "npu":
        return [
            f"each NPU has {NPU_STREAMS} streams and {NPU_BYTES // GIB} GiB; the runtime and its "
            f"communication domains take {NPU_STREAMS_TAKEN} streams and what HCCL's expansion "
            "mode costs, nobody else takes any",
            "no device was asked; a running deployment negotiates over what they really have",
        ]
    return [
        "every rank has the streams and the memory of device.emulator; the runtime takes "
        f"{EMULATOR_STREAMS_TAKEN} streams"
    ]


def _max_model_len(config: Config, facts: ModelFacts) -> int:
    """Return the longest request that the configuration allows.

    Raises:
        ConfigError: it exceeds the model's context.
    """
    if config.max_model_len is not None and config.max_model_len > facts.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model's context is "
            f"{facts.max_model_len} tokens"
        )
    return config.max_model_len or facts.max_model_len
