"""Simulates a load that several groups share. Two comparisons are possible: between two rules that
choose the group of a request, and between a deployment with copies of KV and a deployment without
copies.

All groups run at the same time, but each has its own clock. The group whose clock shows the
earliest time runs the next step. When a request arrives, all groups are first simulated up to this
time. Then the request is sent to a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.routing import RequestRouter
from dist_aclgraph.simulate.files import SimulatedNode
from dist_aclgraph.simulate.group import SimulatedGroup
from dist_aclgraph.simulate.latencies import quantiles
from dist_aclgraph.simulate.load import Arrival

BY_CACHE = "by what is cached and waits"
BY_COUNT = "fewest outstanding"
# A function that is called with a prompt and ``may_hand_over``; see ``RequestRouter.for_role``.
ChooseRole = Callable[..., tuple[bool, Collection[str]]]

WITH_COPIES, WITHOUT_COPIES = "with copies", "without copies"


class Routing(Protocol):
    """A rule that chooses groups for requests. The ingress uses the rule of ``RequestRouter``."""

    def route(
        self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]
    ) -> str: ...

    def begun(self, request_id: str) -> None: ...

    def ended(self, request_id: str) -> None: ...


class FewestOutstanding:
    """A simpler rule than the ingress's: choose the group with the fewest open requests."""

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
    """Plays a load on several groups.

    Args:
        choose_role: a function that decides whether a prefill group computes the prompt of a
            request. None if all groups compute both prompts and outputs.
    """

    def __init__(
        self,
        routing: Routing,
        groups: Sequence[SimulatedGroup],
        choose_role: ChooseRole | None = None,
    ) -> None:
        self._routing = routing
        self._groups = {str(index): group for index, group in enumerate(groups)}
        self._choose_role = choose_role
        self._arrivals: dict[str, Arrival] = {}  # requests at a prefill group

    def play(self, arrivals: Iterable[Arrival], on_arrival: Callable[[], None]) -> dict[str, Any]:
        """Serve all requests. Return the results as values for JSON."""
        sent = dict.fromkeys(self._groups, 0)
        for number, coming in enumerate(arrivals):
            self._pass_time(coming.arrival_s)
            chosen = self._send(str(number), coming)
            if chosen is not None:
                sent[chosen] += 1
            on_arrival()
        self._pass_time(float("inf"))
        return self._report(sent)

    def _send(
        self,
        name: str,
        coming: Arrival,
        output: Sequence[int] = (),
        source: SimulatedNode | None = None,
    ) -> str | None:
        """Send a request to a group. Return the group's name; None if the group has refused the
        request.

        Args:
            output: the tokens that a prefill group has already generated.
            source: the node of this prefill group; None if no prefill group has computed the
                prompt.
        """
        prompt = pack_ints([*coming.token_ids(int(name)), *output])
        hands_over, among = False, list(self._groups)
        if self._choose_role is not None:
            may_hand_over = not output and coming.output_tokens > 1
            hands_over, able = self._choose_role(prompt, may_hand_over=may_hand_over)
            among = list(able)
        chosen = self._routing.route(name, prompt, "", among)
        group = self._groups[chosen]
        if not group.submit(name, coming, hands_over=hands_over, output=output, source=source):
            self._routing.ended(name)
            return None
        if hands_over:
            self._arrivals[name] = coming
        return chosen

    def _pass_time(self, until_s: float) -> None:
        groups = list(self._groups.values())
        while busy := [each for each in groups if each.is_busy and each.clock_s < until_s]:
            group = min(busy, key=lambda each: each.clock_s)
            outputs = next(group.play_until(until_s, lambda: None), None)
            if outputs is not None:
                self._take(outputs)
            self._hand_over(group)
        for group in groups:
            for outputs in group.play_until(until_s, lambda: None):
                self._take(outputs)

    def _hand_over(self, group: SimulatedGroup) -> None:
        """Send each request whose prompt this prefill group has computed to a decode group."""
        for request in group.take_handed_over():
            name = request.request_id
            coming = self._arrivals.pop(name)
            for other in self._groups.values():
                if not other.is_busy:  # the clock of an idle group may show an earlier time
                    for _ in other.play_until(group.clock_s, lambda: None):
                        pass
            output = request.tokens[request.num_prompt_tokens :].tolist()
            self._send(name, coming, output, group.node)

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
            "loaded_share": {
                tier: count / max(1, admitted) for tier, count in self._loaded_tokens().items()
            },
            "fetched_share": self._fetched_tokens() / max(1, admitted),
            "seconds": max(group.clock_s for group in self._groups.values()),
            "groups": [
                {
                    "requests": sent[name],
                    "cached_share": found.num_cached_tokens / max(1, found.num_admitted_tokens),
                }
                for name, found in schedulers.items()
            ],
        }

    def _fetched_tokens(self) -> int:
        """Return the number of tokens whose KV was fetched from other nodes."""
        return sum(
            group.fetches.num_blocks * group.scheduler.ranks[0].pool.block_size
            for group in self._groups.values()
            if group.fetches is not None
        )

    def _loaded_tokens(self) -> Counter[str]:
        """Return the number of tokens whose KV was read from each tier of files."""
        found: Counter[str] = Counter()
        for group in self._groups.values():
            if group.copies is not None:
                size = group.scheduler.ranks[0].pool.block_size
                found.update({n: c * size for n, c in group.copies.num_loaded.items()})
        return found


def make_router(groups: Sequence[SimulatedGroup]) -> RequestRouter:
    """Return a router for these groups. The router names each group by its index, as text."""
    router = RequestRouter()
    for index, group in enumerate(groups):
        pools = [rank.pool for rank in group.scheduler.ranks]
        router.add(str(index), sum(pool.num_usable for pool in pools), pools[0].block_size)
    return router


def compare_copies(
    make_groups: Callable[[bool], Sequence[SimulatedGroup]],
    make_arrivals: Callable[[], Iterable[Arrival]],
    *,
    num_prefill: int,
    prefill_from: int,
) -> list[dict[str, Any]]:
    """Play the same load twice: with copies of KV, and without. Return both results in this order.

    Args:
        make_groups: a function that returns new groups. Its argument says whether the groups keep
            copies.
        num_prefill: number of prefill groups in the run with copies.
        prefill_from: a prefill group computes a prompt only if the prompt has at least this number
            of uncached tokens.
    """
    rows = []
    for name, has_copies in ((WITH_COPIES, True), (WITHOUT_COPIES, False)):
        groups = make_groups(has_copies)
        router, choose_role = make_router(groups), None
        if has_copies and num_prefill:
            limits = {str(i): prefill_from if i < num_prefill else 0 for i in range(len(groups))}
            choose_role = partial(router.for_role, cache_salt="", prefill_from=limits)
        load = RoutedLoad(router, groups, choose_role)
        rows.append({"name": name, **load.play(make_arrivals(), lambda: None)})
    return rows


def compare_routing(
    make_groups: Callable[[], Sequence[SimulatedGroup]],
    make_arrivals: Callable[[], Iterable[Arrival]],
    on_arrival: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Play the same load once with each rule, each time on new groups. Return the results. The
    first result belongs to the ingress's rule.
    """
    rows = []
    for name in (BY_CACHE, BY_COUNT):
        groups = make_groups()
        routing: Routing = FewestOutstanding()
        if name == BY_CACHE:
            routing = make_router(groups)
        rows.append({"name": name, **RoutedLoad(routing, groups).play(make_arrivals(), on_arrival)})
    return rows
