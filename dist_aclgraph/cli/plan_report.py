"""The plan and the caches of a deployment, computed without NPU, weights or Ray.

Some numbers about the device are assumptions; the report lists these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dist_aclgraph.cli.plan_context import context_entry, layout_in_words, print_context
from dist_aclgraph.config import Config
from dist_aclgraph.kv.tiers import HOST
from dist_aclgraph.planning.buckets import GraphFamily, candidate_families, trim_sizes
from dist_aclgraph.planning.budget import (
    PART_BYTES,
    Price,
    StreamOffer,
    streams_of_links,
    total,
)
from dist_aclgraph.planning.choice import padding_share
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.ledger import Ledger, pool_bytes
from dist_aclgraph.planning.memory import EAGER_STEPS, GIB, MemoryPart
from dist_aclgraph.planning.plan import GraphPlan
from dist_aclgraph.planning.planner import content_of
from dist_aclgraph.planning.traffic import Traffic, weights_of
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.topology import ParallelLayout

# For each of these lengths of requests, in tokens, the report says how many requests fit.
REQUEST_TOKENS = (1024, 4096, 16384, 65536)
CHOSEN, ALL_SIZES, UNIFORM = "chosen", "all sizes", "as many, evenly by index"


def plan_report(config: Config) -> dict[str, Any]:
    """Return a JSON value that contains the graphs that the deployment would capture, and the
    reasons for these graphs.

    Raises:
        ConfigError: the model's directory has no checkpoint, the model's sizes do not fit the
            layout, or a device has too little memory for weights, buffers and KV blocks.
        StreamBudgetError: a rank has too few streams for even one bucket.
    """
    deployment = AssumedDeployment.from_config(config)
    config = deployment.config  # this copy has a graph mode that the model supports
    layout = deployment.layout
    model, spec = deployment.budget_model, deployment.planner.cache_spec
    families = candidate_families(config)
    groups = layout.lockstep_groups
    scopes = [groups] if config.graph.scope == "cluster" else [[group] for group in groups]
    found = [
        deployment.planner.negotiate([deployment.offers[rank] for group in scope for rank in group])
        for scope in scopes
    ]
    offers = sorted((o for item in found for o in item.offers), key=lambda offer: offer.rank)
    plans = [item.plan for item, scope in zip(found, scopes, strict=True) for _ in scope]
    costs = _Costs(deployment)
    ranks = [
        _rank_entry(offer, layout, plans[layout.lockstep_group_of(offer.rank)], costs)
        for offer in offers
    ]
    pool = max(rank["pool_bytes"] or 0 for rank in ranks)
    num_blocks = deployment.num_blocks(pool)
    longest = spec.longest_request(num_blocks, deployment.planner.max_model_len)
    node_npus = config.device.npus_of_node
    return {
        "model": {"name": config.name, "path": config.model, **_facts_entry(deployment.facts)},
        "layout": {
            **config.parallel.model_dump(),
            "world_size": layout.world_size,
            "lockstep_groups": [list(group) for group in layout.lockstep_groups],
        },
        "assumptions": deployment.assumptions,
        "graph": {
            "mode": config.graph.mode,
            "mode_reasons": list(deployment.planner.mode_reasons),
            "scope": config.graph.scope,
            "budget_model": model.name,
            "families": [_family_entry(f, model.price(f, offers[0])) for f in families],
            "fixed_price": total(model.fixed(offers[0])),
            "fixed_terms": _terms(model.fixed(offers[0])),
            "traffic": _traffic_in_words(config),
            "lazy_capacity": min(item.lazy_capacity for item in found),
        },
        "exchanges": _exchange_entries(deployment.exchange),
        "plans": [_plan_entry(config, group, plan) for group, plan in enumerate(plans)],
        "ranks": ranks,
        "memory": _memory_entry(deployment, pool, num_blocks),
        "nodes": _num_nodes(layout, config.parallel.tp, node_npus),
        "node_npus": node_npus,
        "kv": {
            "block_size": spec.block_size,
            "bytes_per_block": spec.bytes_per_block,
            "num_blocks": num_blocks,
            "bytes": num_blocks * spec.bytes_per_block,
            "num_shards": spec.num_shards,
            "tokens": (num_blocks - 1) * spec.tokens_per_block,
            "all_tokens": config.parallel.dp * (num_blocks - 1) * spec.tokens_per_block,
            "max_model_len": longest,
            "requests": _requests_that_fit(deployment, num_blocks, longest),
            "copies": {
                "memory" if name == HOST else name: {
                    "tokens": count * deployment.planner.cache_spec.tokens_per_block
                }
                for name, count in deployment.copied_blocks.items()
            },
            "hixl": _hixl_entry(config),
        },
        "states": deployment.states,
        "context": context_entry(deployment, pool),
    }


def render_plan(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    model, layout, graph = (report[key] for key in ("model", "layout", "graph"))
    console.print(
        f"[bold]{model['name']}[/bold]: {model['architecture']}, {model['num_layers']} layers; "
        f"{layout['world_size']} NPUs ({layout_in_words(layout)}) in "
        f"{_counted(len(layout['lockstep_groups']), 'lockstep group')}, on at least "
        f"{_counted(report['nodes'], 'node')} of {report['node_npus']} NPUs"
    )
    for sentence in report["assumptions"]:
        console.print(f"  assumed: {sentence}")
    _print_memory(report, console)
    for reason in graph["mode_reasons"]:
        console.print(reason)
    console.print(f"Graphs: {graph['mode']}, priced by {graph['budget_model']}")
    for family in graph["families"]:
        console.print(f"  {family['price_per_bucket']} streams for each {family['name']} bucket")
        _print_terms(family["terms"], console)
    console.print(f"  {graph['fixed_price']} streams for the plan as a whole")
    _print_terms(graph["fixed_terms"], console)
    console.print(f"  streams are reserved for {graph['lazy_capacity']} lazy graphs")
    if copies := layout["redundant_experts"]:
        num_experts = model["experts"]["num_experts"]
        per_rank = (num_experts + copies) // layout["ep"]
        console.print(f"Experts: {num_experts} and {copies} copies, {per_rank} on each NPU")
    for entry in report["exchanges"]:
        sizes = f"{entry['first']} to {entry['last']} tokens"
        algorithm = f" ({entry['algorithm']})" if entry["algorithm"] else ""
        console.print(f"Experts for {sizes}: {entry['kind']}{algorithm}; {entry['reason']}")
    for plan, groups in _alike(report["plans"], "group"):
        name = f"Group {groups}" if groups.isdecimal() else f"Groups {groups}"
        console.print(f"{name}: plan {plan['hash'][:12]}")
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


def _print_memory(report: dict[str, Any], console: Console) -> None:
    """Print the use of memory, and the number of requests that fit."""
    layout, memory, kv = report["layout"], report["memory"], report["kv"]
    console.print(_memory_table(memory))
    console.print(
        f"Weights: {memory['weight_bytes'] / GIB:.2f} GiB on each NPU, "
        f"{layout['world_size'] * memory['weight_bytes'] / GIB:.2f} GiB on all "
        f"{layout['world_size']} NPUs"
    )
    shards = f" of {kv['num_shards']} shards" if kv["num_shards"] > 1 else ""
    console.print(
        f"KV cache per NPU: {kv['num_blocks']} blocks of {kv['block_size']} tokens{shards}, "
        f"{kv['bytes_per_block']} bytes each, {kv['bytes'] / GIB:.2f} GiB in all; "
        f"{kv['tokens']} tokens, the longest request {kv['max_model_len']}"
        + (f"; {kv['all_tokens']} tokens on all data parallel ranks" if layout["dp"] > 1 else "")
    )
    if copies := kv["copies"]:
        tiers = "; ".join(f"{row['tokens']} tokens in {name}" for name, row in copies.items())
        console.print(f"Copies of KV on each node: {tiers}", highlight=False)
    if (hixl := kv["hixl"]) is not None:
        console.print(
            f"Nodes fetch copies over HIXL: {hixl['streams']} streams of each rank are reserved "
            "for links; on each node, one worker of each data parallel rank has "
            f"{hixl['host_bytes'] >> 20} MiB of pinned memory, and listens without keys",
            highlight=False,
        )
    if (states := report["states"]) is not None:
        console.print(
            f"States per NPU: {states['num_slots']} slots of {states['bytes_per_slot']} bytes, "
            f"{states['bytes'] / GIB:.2f} GiB in all; {states['slots_per_request']} for each of "
            f"{states['num_requests']} requests, {states['num_checkpoints']} checkpoints, "
            "1 for padding"
        )
    fits = "; ".join(f"{row['requests']} of {row['tokens']} tokens" for row in kv["requests"])
    console.print(
        f"Requests that fit at once into the {layout['dp']} data parallel ranks: {fits}",
        highlight=False,
    )
    if report["context"] is not None:
        print_context(report["context"], console)


def _facts_entry(facts: ModelFacts) -> dict[str, Any]:
    """Return the facts of a model; sets of layers become lists, because JSON has no sets."""
    return asdict(
        facts,
        dict_factory=lambda items: {
            key: sorted(value) if isinstance(value, frozenset) else value for key, value in items
        },
    )


def _requests_that_fit(
    deployment: AssumedDeployment, num_blocks: int, longest: int
) -> list[dict[str, int]]:
    """Return, for each length, the number of requests of this length that fit into the KV caches of
    all ranks.
    """
    spec, dp = deployment.planner.cache_spec, deployment.config.parallel.dp
    lengths = [*(tokens for tokens in REQUEST_TOKENS if tokens < longest), longest]
    return [
        {"tokens": tokens, "requests": dp * ((num_blocks - 1) // spec.blocks_for(tokens))}
        for tokens in lengths
    ]


def _num_nodes(layout: ParallelLayout, tp: int, node_npus: int) -> int:
    """Return the smallest number of nodes that have enough NPUs for all ranks.

    A tensor parallel group that fits on one node is not divided between nodes.
    """
    whole = max(1, node_npus // tp) * tp if tp <= node_npus else node_npus
    return -(-layout.world_size // whole)


def _exchange_entries(rule: ExchangeRule) -> list[dict[str, Any]]:
    """For each range of batch sizes, return how tokens are sent to experts on other ranks; empty if
    no tokens are sent.
    """
    operators = rule.mc2.operators if rule.mc2 is not None else None
    return [
        {
            "first": first,
            "last": last,
            "kind": decision.kind,
            "algorithm": operators.algorithm if operators and decision.kind == "mc2" else None,
            "reason": decision.reason,
        }
        for first, last, decision in rule.stretches()
        if decision.kind is not None
    ]


def _memory_entry(deployment: AssumedDeployment, pool: int, num_blocks: int) -> dict[str, Any]:
    """Return the use of memory on the NPU with the least memory: its parts, and the bytes that stay
    free.
    """
    memory, spec = deployment.memory, deployment.planner.cache_spec
    graphs = deployment.graph_bytes(pool)
    parts = [
        *memory.parts,
        MemoryPart("graphs", graphs, "predicted" if pool else "estimated from above"),
        MemoryPart("KV blocks", num_blocks * spec.bytes_per_block),
        MemoryPart("states", spec.state_bytes),
        MemoryPart(EAGER_STEPS, memory.eager_bytes, "estimated from above"),
    ]
    left = memory.device_bytes - sum(part.bytes for part in parts)
    return {
        "device_bytes": memory.device_bytes,
        "weight_bytes": memory.weight_bytes,
        "parts": [part._asdict() for part in parts if part.bytes],
        "left_bytes": left,
    }


def _memory_table(memory: dict[str, Any]) -> Table:
    table = Table("memory of each NPU", Column("GiB", justify="right"), "of what")
    for part in memory["parts"]:
        table.add_row(part["name"], f"{part['bytes'] / GIB:.2f}", part["why"])
    table.add_row("left", f"{memory['left_bytes'] / GIB:.2f}")
    table.add_row("in all", f"{memory['device_bytes'] / GIB:.2f}")
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print_terms(terms: list[dict[str, Any]], console: Console) -> None:
    for term in terms:
        console.print(f"    {term['total']:5} {term['name']}: {term['why']}")


def _alike(entries: list[dict[str, Any]], *numbers: str) -> Iterator[tuple[Any, ...]]:
    """Merge entries that differ only in the keys ``numbers``. Yield each merged entry, and a short
    text for each of these keys. The text lists all values of the key.

    So the entries of thousands of ranks become a few lines.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        rest = {key: value for key, value in entry.items() if key not in numbers}
        found.setdefault(repr(rest), []).append(entry)
    for alike in found.values():
        yield alike[0], *(_ranges({entry[name] for entry in alike}) for name in numbers)


def _ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as a short text, e.g. ``0-2, 5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    table = Table("ranks", "groups", "device", "offers", "captures", "costs", "left")
    shown = [{k: v for k, v in entry.items() if k != "domains"} for entry in ranks]
    for entry, names, groups in _alike(shown, "rank", "group"):
        table.add_row(
            names,
            groups,
            entry["device"],
            f"{entry['usable']} of {entry['available']} streams",
            f"{entry['num_buckets']} buckets",
            f"{entry['planned_streams']} streams",
            f"{entry['left_streams']} streams",
        )
    return table


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
    """Return a family's chosen buckets, and the fraction of padding of each of three sets of
    buckets.

    The sets are: the chosen buckets, all sizes, and evenly spaced sizes.
    """
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


class _Costs:
    """The cost of a plan on each rank. The cost is computed only once for ranks whose
    ``StreamOffer`` objects are equal.
    """

    def __init__(self, deployment: AssumedDeployment) -> None:
        self._deployment = deployment
        self._known: dict[tuple[str, bytes], dict[str, Any]] = {}

    def of(self, plan: GraphPlan, offer: StreamOffer) -> dict[str, Any]:
        key = plan.hash, content_of(offer)
        if key not in self._known:
            self._known[key] = self._predict(plan, offer)
        return self._known[key]

    def _predict(self, plan: GraphPlan, offer: StreamOffer) -> dict[str, Any]:
        model = self._deployment.budget_model
        ledger = Ledger.predict(offer, plan, model)
        fixed = total(model.fixed(offer)) if plan.families else 0
        streams = ledger.predicted_streams + fixed
        return {
            "num_buckets": plan.num_graphs,
            "prices": {e.term: e.predicted for e in ledger.entries if e.unit == "streams"},
            "planned_streams": streams,
            # None if no bytes were predicted.
            "pool_bytes": pool_bytes(plan, offer, model) or None,
            "left_streams": offer.usable - streams,
        }


def _rank_entry(
    offer: StreamOffer, layout: ParallelLayout, plan: GraphPlan, costs: _Costs
) -> dict[str, Any]:
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
        **costs.of(plan, offer),
    }


def _hixl_entry(config: Config) -> dict[str, int] | None:
    """Return the number of streams and the host memory that HIXL needs; None if the transport
    between nodes is not HIXL.
    """
    if not config.fetches_by_hixl:
        return None
    return {"streams": streams_of_links(config), "host_bytes": 2 * PART_BYTES}


def _traffic_in_words(config: Config) -> str:
    if config.graph.traffic or config.graph.mixed_traffic:
        return "the configured traffic"
    return "assumed traffic, in which a batch of n tokens weighs 1/n"
