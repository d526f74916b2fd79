"""A load that several groups share. Two rules for sending requests to groups are compared: the rule
of the ingress, and a simpler rule.

All groups run at the same time, each with its own clock. When a request is sent, all groups have
been simulated up to its arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from dist_aclgraph.ints import pack_ints
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.routing import RequestRouter
from dist_aclgraph.simulate.group import SimulatedGroup
from dist_aclgraph.simulate.latencies import quantiles
from dist_aclgraph.simulate.load import Arrival

BY_CACHE = "by what is cached and waits"
BY_COUNT = "fewest outstanding"


class Routing(Protocol):
    """A rule that chooses groups for requests. ``RequestRouter`` implements the ingress's rule."""

    def route(
        self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]
    ) -> str: ...

    def begun(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None: ...


class FewestOutstanding:
    """The simpler rule: choose the group with the fewest open requests."""

    def __init__(self) -> None:
        self._group_of: dict[str, str] = {}

    def route(self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]) -> str:
        open_requests = list(self._group_of.values())
        self._group_of[request_id] = min(among, key=open_requests.count)
        return self._group_of[request_id]

    def begun(self, request_id: str) -> None:
        pass

    def ended(self, request_id: str) -> None:
        self._group_of.pop(request_id, None)


class RoutedLoad:
    """Plays a load on several groups."""

    def __init__(self, routing: Routing, groups: Sequence[SimulatedGroup]) -> None:
        self._routing = routing
        self._groups = {str(index): group for index, group in enumerate(groups)}

    def play(self, arrivals: Iterable[Arrival], on_arrival: Callable[[], None]) -> dict[str, Any]:
        """Serve all requests; return the results as plain values."""
        sent = dict.fromkeys(self._groups, 0)
        for number, coming in enumerate(arrivals):
            self._pass_time(coming.arrival_s)
            name = str(number)
            prompt = pack_ints(coming.token_ids(number))
            chosen = self._routing.route(name, prompt, "", list(self._groups))
            if self._groups[chosen].submit(name, coming):
                sent[chosen] += 1
            else:
                self._routing.ended(name)
            on_arrival()
        self._pass_time(float("inf"))
        return self._report(sent)

    def _pass_time(self, until_s: float) -> None:
        for group in self._groups.values():
            for outputs in group.play_until(until_s, lambda: None):
                self._take(outputs)

    def _take(self, outputs: StepOutputs) -> None:
        for index in outputs.firsts.tolist():
            self._routing.begun(outputs.requests[index].request_id)
        for index in outputs.finish_reasons:
            self._routing.ended(outputs.requests[index].request_id)

    def _report(self, sent: dict[str, int]) -> dict[str, Any]:
        schedulers = {name: group.scheduler for name, group in self._groups.items()}
        admitted = sum(found.num_admitted_tokens for found in schedulers.values())
        cached = sum(found.num_cached_tokens for found in schedulers.values())
        waited_s = [s for group in self._groups.values() for s in group.latencies.first_token_s]
        return {
            "cached_share": cached / admitted if admitted else 0.0,
            "first_token_s": quantiles(waited_s),
            "seconds": max(group.clock_s for group in self._groups.values()),
            "groups": [
                {
                    "requests": sent[name],
                    "cached_share": found.num_cached_tokens / max(1, found.num_admitted_tokens),
                }
                for name, found in schedulers.items()
            ],
        }


def compare_routing(
    make_groups: Callable[[], Sequence[SimulatedGroup]],
    make_arrivals: Callable[[], Iterable[Arrival]],
    on_arrival: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Play one load with each rule, on new groups each time; return the ingress's rule first."""
    rows = []
    for name in (BY_CACHE, BY_COUNT):
        groups = make_groups()
        routing: Routing = FewestOutstanding()
        if name == BY_CACHE:
            pools = [[rank.pool for rank in group.scheduler.ranks] for group in groups]
            routing = router = RequestRouter()
            for index, found in enumerate(pools):
                num_blocks = sum(pool.num_usable for pool in found)
                router.add(str(index), num_blocks, found[0].block_size)
        rows.append({"name": name, **RoutedLoad(routing, groups).play(make_arrivals(), on_arrival)})
    return rows
