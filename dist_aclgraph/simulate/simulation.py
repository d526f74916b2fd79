"""A whole simulation of a deployment. For each different plan, the load is played on one group. The
overall result is computed from the results of these groups.

Groups with equal plans get equal shares of the load. So only one of these groups is simulated, and
this group represents the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.ledger import pool_bytes
from dist_aclgraph.planning.planner import NegotiatedPlan, content_of
from dist_aclgraph.simulate.compare import compare
from dist_aclgraph.simulate.copy_rates import CopyRates
from dist_aclgraph.simulate.deployment import (
    AssumedDeployment,
    distinct,
)
from dist_aclgraph.simulate.files import SimulatedNode
from dist_aclgraph.simulate.group import SimulatedGroup
from dist_aclgraph.simulate.latencies import latency_report
from dist_aclgraph.simulate.load import Arrival, Batch, Load, Trace
from dist_aclgraph.simulate.load_options import DEFAULT_REQUESTS, LoadOptions, draw_load, until
from dist_aclgraph.simulate.routing import compare_copies, compare_routing
from dist_aclgraph.simulate.tally import Shares
from dist_aclgraph.simulate.times import StepTimes

MAX_GROUPS = 8  # maximum number of simulated groups; the kinds with the most groups are chosen

# A function that is called with the fraction of the load that has been played, from 0 to 1.
OnProgress = Callable[[float], None]


@dataclass(frozen=True)
class GroupKind:
    """Lockstep groups whose ranks offer equal resources for graphs, so that the groups have the
    same plan.

    Attributes:
        first: index of the group that is simulated.
        num_groups: number of groups of this kind, including the simulated group.
    """

    first: int
    num_groups: int
    negotiated: NegotiatedPlan


def simulate(
    config: Config,
    options: LoadOptions,
    times: StepTimes,
    *,
    rates: CopyRates | None = None,
    with_comparison: bool = False,
    on_progress: OnProgress = lambda share: None,
) -> dict[str, Any]:
    """Play a load, and return the results as values for JSON.

    Equal arguments lead to equal results, except for ``speed``, which depends on this machine.

    Raises:
        ConfigError: the model, the options or the trace are invalid.
        StreamBudgetError: a rank has too few streams for a single bucket.
    """
    options.check_options()
    rates = rates or CopyRates()
    deployment = AssumedDeployment.from_config(config)
    trace = None
    if options.trace is not None:
        trace = Trace(options.trace, decode_len=config.speculative.num_tokens + 1)
        if trace.kind == "batches" and options.requests is not None:
            raise ConfigError(
                f"{options.trace} is a trace of batches, which no --requests can end; "
                "give --seconds"
            )
    has_requests = trace is None or trace.kind == "requests"
    num_drafts = config.speculative.num_tokens
    if num_drafts and has_requests and options.accepted is None:
        raise ConfigError(
            f"speculative.num_tokens is {num_drafts}: give --accepted, the share of drafts that "
            "are accepted (/metrics of a deployment counts them), or set it to 0"
        )
    began_s = time.perf_counter()
    kinds = group_kinds(deployment)
    planned_s = time.perf_counter() - began_s
    played = kinds[:MAX_GROUPS]
    num_blocks = _num_blocks(deployment, [kind.negotiated for kind in kinds])
    is_shared = config.graph.scope == "cluster"
    began_s = time.perf_counter()
    groups = []
    for index, kind in enumerate(played):
        make_group = _group_maker(deployment, kind, options, times, num_blocks)
        group = make_group(shares_plan_with=kind.num_groups if is_shared else 1)

        def show(share: float, index: int = index) -> None:
            on_progress((index + share) / len(played))

        _play(group, kind, deployment, options, trace, num_blocks, show)
        groups.append(group)
    seconds = time.perf_counter() - began_s
    steps = sum(group.dispatcher.step for group in groups)
    num_groups = len(deployment.layout.lockstep_groups)
    overall = Shares()
    for group, kind in zip(groups, played, strict=True):
        overall.merge(group.tally.all, kind.num_groups)
    return {
        "model": {"name": config.name, **deployment.config.parallel.model_dump()},
        "num_ranks": deployment.layout.world_size,
        "num_groups": num_groups,
        "mode": deployment.config.graph.mode,
        "budget_model": deployment.budget_model.name,
        "load": _load_in_words(options, trace, num_groups),
        "assumptions": [
            *deployment.planner.mode_reasons,
            *deployment.assumptions,
            times.in_words,
            f"every capture succeeds and takes {times.capture_s * 1e3:g} ms, in which no step runs",
            *_drafts_in_words(options, num_drafts if has_requests else 0),
            *_groups_in_words(kinds, num_groups, trace),
            *_copies_in_words(deployment, rates),
        ],
        "overall": overall.report(),
        "groups": [group_report(group, kind) for group, kind in zip(groups, played, strict=True)],
        "routing": _routing(deployment, kinds[0], options, times, num_blocks),
        "copies": (
            _copies(deployment, kinds[0], options, trace, times, num_blocks, rates)
            if has_requests and deployment.copied_blocks
            else None
        ),
        "compare": (
            compare(deployment, groups[0], played[0].negotiated) if with_comparison else None
        ),
        "speed": {
            "plan_seconds": planned_s,
            "steps": steps,
            "seconds": seconds,
            "steps_per_s": steps / seconds,
        },
    }


def group_kinds(deployment: AssumedDeployment) -> list[GroupKind]:
    """Return one kind for each set of groups whose ranks offer equal resources for graphs. The kind
    with the most groups comes first.
    """
    groups, offers = deployment.layout.lockstep_groups, deployment.offers
    if deployment.config.graph.scope == "cluster":
        return [GroupKind(0, len(groups), deployment.planner.negotiate(offers))]
    members: dict[tuple[bytes, ...], list[int]] = {}
    for index, ranks in enumerate(groups):
        key = tuple(sorted({content_of(offers[rank]) for rank in ranks}))
        members.setdefault(key, []).append(index)
    found = [
        GroupKind(
            indices[0],
            len(indices),
            deployment.planner.negotiate([offers[rank] for rank in groups[indices[0]]]),
        )
        for indices in members.values()
    ]
    return sorted(found, key=lambda kind: (-kind.num_groups, kind.first))


def group_report(group: SimulatedGroup, kind: GroupKind) -> dict[str, Any]:
    """Return the results of one group, as values for JSON."""
    counts, counters = group.counts, group.dispatcher.report()
    lazy = group.dispatcher.lazy
    offer = group.tightest
    return {
        "group": kind.first,
        "stands_for": kind.num_groups,
        "seconds": group.clock_s,
        **group.tally.all.report(),
        "eager_steps": counters["misses"],
        "replays": counters["replays"],
        "wasted_by_graph": counters["wasted_by_graph"],
        "requests": {
            "finished": counts.finished,
            "refused": dict(sorted(counts.refused.items())),
            "generated_tokens": counts.generated_tokens,
            "most_waiting": counts.most_waiting,
        },
        "latency": latency_report(group.latencies, counts.generated_tokens, group.clock_s),
        "preemptions": group.scheduler.num_preemptions,
        "drafts": _drafts_report(group.scheduler.stats()),
        "num_blocks": group.scheduler.ranks[0].pool.num_blocks,
        "streams": {
            "rank": offer.rank,
            "usable": offer.usable,
            "kept_for_lazy_graphs": offer.reserve - group.reserve,
            "at_most": group.most_streams,
        },
        "lazy": {
            "capacity": group.lazy_capacity,
            "captures": counts.lazy_captures,
            "evictions": counts.lazy_evictions,
            "graphs": [] if lazy is None else list(map(str, lazy.graphs)),
        },
        "plan_changes": counts.plan_changes,
        "plan_captures": counts.plan_captures,
        "plan_versions": list(group.versions),
        "over_time": group.tally.over_time.report(),
        "by_tokens": group.tally.by_tokens(),
    }


def _drafts_report(stats: dict[str, int]) -> dict[str, Any]:
    """Return how often drafts were verified, and the mean number of tokens that a request gets from
    one verification.
    """
    verified = stats["drafts"]
    each = 1 + stats["accepted_tokens"] / verified if verified else 1.0
    return {"verifications": verified, "tokens_per_verification": each}


def _play(
    group: SimulatedGroup,
    kind: GroupKind,
    deployment: AssumedDeployment,
    options: LoadOptions,
    trace: Trace | None,
    num_blocks: int,
    on_progress: OnProgress,
) -> None:
    num_groups = len(deployment.layout.lockstep_groups)
    max_seconds = math.inf if options.seconds is None else options.seconds
    if trace is not None and trace.kind == "batches":
        batches: Load[Batch] = trace.batches()
        group.play_batches(batches.begin(), max_seconds, lambda: on_progress(batches.progress()))
        return
    if trace is not None:
        requests: Load[Arrival] = trace.requests()
        dealt = islice(requests.begin(), kind.first, options.requests, num_groups)
        arrivals = until(dealt, max_seconds)
        group.play_requests(arrivals, lambda: on_progress(requests.progress()))
        return
    drawn = draw_load(
        deployment, options, num_blocks, share=Fraction(1, num_groups), first=kind.first
    )
    wanted = math.ceil((options.requests or DEFAULT_REQUESTS) / num_groups)

    def done() -> float:
        if options.seconds is not None:
            return min(1.0, group.clock_s / max_seconds)
        return group.counts.finished / wanted

    group.play_requests(drawn, lambda: on_progress(done()))


def _group_maker(
    deployment: AssumedDeployment,
    kind: GroupKind,
    options: LoadOptions,
    times: StepTimes,
    num_blocks: int,
) -> Callable[..., SimulatedGroup]:
    """Return a function that creates a simulated group of this kind. The function passes its
    arguments to ``SimulatedGroup``.
    """
    return partial(
        SimulatedGroup,
        deployment,
        kind.negotiated,
        num_blocks,
        times,
        accepted=options.accepted or 0.0,
        seed=options.seed,
    )


def _routing(
    deployment: AssumedDeployment,
    kind: GroupKind,
    options: LoadOptions,
    times: StepTimes,
    num_blocks: int,
) -> list[dict[str, Any]] | None:
    """Play the drawn load with shared prefixes on several groups, once for each routing rule."""
    num_groups = min(len(deployment.layout.lockstep_groups), MAX_GROUPS)
    if not options.beginnings or num_groups == 1:
        return None
    share = Fraction(num_groups, len(deployment.layout.lockstep_groups))
    make_group = _group_maker(deployment, kind, options, times, num_blocks)
    return compare_routing(
        lambda: [make_group() for _ in range(num_groups)],
        lambda: draw_load(deployment, options, num_blocks, share=share),
    )


def _copies(
    deployment: AssumedDeployment,
    kind: GroupKind,
    options: LoadOptions,
    trace: Trace | None,
    times: StepTimes,
    num_blocks: int,
    rates: CopyRates,
) -> list[dict[str, Any]]:
    """Play the load on several groups twice: with copies of KV, and without."""
    parallel, all_groups = deployment.config.parallel, deployment.layout.lockstep_groups
    num_groups = min(len(all_groups), MAX_GROUPS)
    share = Fraction(num_groups, len(all_groups))
    per_node = max(1, deployment.config.device.npus_of_node // len(all_groups[0]))
    make_group = _group_maker(deployment, kind, options, times, num_blocks)

    def make_groups(has_copies: bool) -> list[SimulatedGroup]:
        nodes = [SimulatedNode.of(deployment) for _ in range(-(-num_groups // per_node))]
        return [
            make_group(node=nodes[index // per_node] if has_copies else None, rates=rates)
            for index in range(num_groups)
        ]

    def make_arrivals() -> Iterator[Arrival]:
        if trace is None:
            return draw_load(deployment, options, num_blocks, share=share)
        requests = islice(trace.requests().begin(), options.requests)
        kept = (each for n, each in enumerate(requests) if n % len(all_groups) < num_groups)
        return until(kept, math.inf if options.seconds is None else options.seconds)

    num_prefill = min(num_groups - 1, math.ceil(parallel.prefill_groups * share))
    return compare_copies(
        make_groups,
        make_arrivals,
        num_prefill=num_prefill,
        prefill_from=parallel.prefill_from_tokens,
    )


def _num_blocks(deployment: AssumedDeployment, found: Sequence[NegotiatedPlan]) -> int:
    model = deployment.budget_model
    return deployment.num_blocks(
        max(
            pool_bytes(item.plan, offer, model) for item in found for offer in distinct(item.offers)
        )
    )


def _load_in_words(options: LoadOptions, trace: Trace | None, num_groups: int) -> str:
    if trace is not None and trace.kind == "batches":
        return f"the batches of {options.trace}, each a step of every group"
    if trace is not None:
        return f"the requests of {options.trace}, given to {num_groups} groups in turn"
    prefixes = ""
    if options.beginnings:
        prefixes = (
            f"; each prompt begins with {options.beginning_tokens} more tokens, one of "
            f"{options.beginnings} prefixes"
        )
    return (
        f"{options.poisson:g} random requests per second; prompts have {options.prompt_tokens:g} "
        f"tokens and outputs {options.output_tokens:g} tokens (means of lognormal distributions, "
        f"before clipping); seed {options.seed}{prefixes}; each of {num_groups} groups gets an "
        "equal share"
    )


def _drafts_in_words(options: LoadOptions, num_drafts: int) -> list[str]:
    if not num_drafts:
        return []
    return [f"a draft is accepted with probability {options.accepted:g} if all before it were"]


def _copies_in_words(deployment: AssumedDeployment, rates: CopyRates) -> list[str]:
    if not deployment.copied_blocks:
        return []
    return [
        "the counts of groups are those of a deployment without copies of KV and prefill groups",
        rates.in_words,
    ]


def _groups_in_words(kinds: Sequence[GroupKind], num_groups: int, trace: Trace | None) -> list[str]:
    found = [
        f"lockstep group {kind.first} was simulated and stands for {kind.num_groups} groups whose "
        "ranks offer the same"
        for kind in kinds[:MAX_GROUPS]
        if kind.num_groups > 1
    ]
    left_out = sum(kind.num_groups for kind in kinds[MAX_GROUPS:])
    if left_out:
        found.append(
            f"{left_out} of {num_groups} groups have plans of {len(kinds) - MAX_GROUPS} other "
            "kinds and were not simulated"
        )
    if trace is None or trace.kind == "requests":
        found.append("prompts have different beginnings, so the prefix cache helps only after a "
                     "preemption")  # fmt: skip
    return found
