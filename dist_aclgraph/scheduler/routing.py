"""Which lockstep group a request goes to: one rule, for what is cached there and how much waits.

An ingress does not see the caches of the groups. Each remembers which beginnings it has sent where,
as many as a group's cache holds, and shares nothing with other replicas but a number for each
group: the tokens that wait there for its own requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.ints import INT_BYTES
from dist_aclgraph.kv.block_pool import BlockHash, hash_block, salted_root

# What an open request weighs beside those tokens of its prompt that are still to be computed: it
# takes a place in every step until it ends.
REQUEST_TOKENS = 64
# A token that is cached counts twice: this request does not wait for it, and no other one waits
# while it is computed again elsewhere.
WORTH_OF_CACHED = 2


def choose_group(waiting: Sequence[int], cached: Sequence[int], first: int = 0) -> int:
    """Return the index of the group with the fewest waiting tokens, less its cached tokens.

    The group has at most ``WORTH_OF_CACHED * cached`` more tokens to do than the least busy group.
    Within this limit, prompts with the same beginning go to the same group. Of equal groups, the
    one with more cached tokens is chosen, then the next one from ``first`` on.

    Args:
        waiting: tokens that wait at each group, at least one group.
        cached: tokens of the request's prompt that each group has in its cache.
    """
    count = len(waiting)
    return min(
        range(count),
        key=lambda i: (waiting[i] - WORTH_OF_CACHED * cached[i], -cached[i], (i - first) % count),
    )


def block_hashes(prompt: bytes, cache_salt: str, tokens_per_block: int) -> list[BlockHash]:
    """Return the hashes of those full blocks of a prompt that a prefix cache may give to it.

    As in the scheduler, one token at least is left to compute.

    Args:
        prompt: int32 [num_prompt_tokens].
    """
    size = INT_BYTES * tokens_per_block
    found, parent = [], salted_root(cache_salt)
    for end in range(size, len(prompt), size):
        parent = hash_block(parent, prompt[end - size : end])
        found.append(parent)
    return found


class PrefixMemory:
    """Which blocks a group was sent, as many as it can hold; the longest unused are forgotten.

    Owns their hashes. Knows nothing of what the group really keeps.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._known: OrderedDict[BlockHash, None] = OrderedDict()  # longest unused first

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the first blocks are known."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._known:
                return count
        return len(hashes)

    def note(self, hashes: Sequence[BlockHash]) -> None:
        """Remember what the group is about to compute or to use again."""
        # Later blocks are forgotten first: without its beginning, a prefix cannot be found.
        for block_hash in reversed(hashes):
            self._known[block_hash] = None
            self._known.move_to_end(block_hash)
        while len(self._known) > self.num_blocks:
            self._known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()


@dataclass
class _Group:
    memory: PrefixMemory
    tokens_per_block: int
    own_tokens: int = 0
    others_tokens: int = 0


@dataclass
class _Open:
    group: str
    uncomputed: int  # tokens of its prompt


@dataclass
class RoutedCounts:
    """What was sent to a group since the router began.

    Attributes:
        routed_requests: of them all.
        routed_prompt_tokens: of those requests.
        routed_cached_tokens: of those, the ones that the group was taken to have in its cache.
    """

    routed_requests: int = 0
    routed_prompt_tokens: int = 0
    routed_cached_tokens: int = 0


@dataclass
class Router:
    """Owns what one ingress knows of the groups, by their names, and of its open requests.

    Args:
        first: which of equal groups comes first; replicas that differ in it do not all begin
            with the same one.
    """

    first: int = 0
    counts: dict[str, RoutedCounts] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)

    def add(self, group: str, cache_blocks: int, tokens_per_block: int) -> None:
        """Get to know a group, or its cache, which no other group's need be like."""
        known = self._groups.get(group)
        if known is None:
            self._groups[group] = _Group(PrefixMemory(cache_blocks), tokens_per_block)
            self.counts.setdefault(group, RoutedCounts())
            return
        known.memory.num_blocks = cache_blocks
        if known.tokens_per_block != tokens_per_block:  # it was a guess
            known.tokens_per_block = tokens_per_block
            known.memory.clear()

    def remove(self, group: str) -> None:
        """Forget a group, whose requests are over."""
        self._groups.pop(group, None)
        self.counts.pop(group, None)

    def forget_cache(self, group: str) -> None:
        """A group has begun anew: its cache is empty, and nobody's requests wait there."""
        known = self._groups[group]
        known.memory.clear()
        known.others_tokens = 0

    def hear(self, group: str, others_tokens: int) -> None:
        """Take in how many tokens wait at a group for requests of other replicas."""
        self._groups[group].others_tokens = others_tokens

    def load(self, group: str) -> int:
        """Return how many tokens wait at a group for this router's own requests."""
        return self._groups[group].own_tokens

    def route(self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]) -> str:
        """Choose a group for a request and book it there.

        Args:
            prompt: int32 [num_prompt_tokens].
            among: the groups that take requests, at least one.
        """
        names = list(among)
        groups = [self._groups[name] for name in names]
        sizes = {group.tokens_per_block for group in groups}
        hashes = {size: block_hashes(prompt, cache_salt, size) for size in sizes}
        cached = [
            group.memory.match(hashes[group.tokens_per_block]) * group.tokens_per_block
            for group in groups
        ]
        waiting = [group.own_tokens + group.others_tokens for group in groups]
        index = choose_group(waiting, cached, self.first)
        self.first += 1
        name, num_tokens = names[index], len(prompt) // INT_BYTES
        uncomputed = num_tokens - cached[index]
        groups[index].memory.note(hashes[groups[index].tokens_per_block])
        groups[index].own_tokens += uncomputed + REQUEST_TOKENS
        self._open[request_id] = _Open(name, uncomputed)
        counts = self.counts[name]
        counts.routed_requests += 1
        counts.routed_prompt_tokens += num_tokens
        counts.routed_cached_tokens += cached[index]
        return name

    def begun(self, request_id: str) -> None:
        """A request has its first token: its prompt waits no more."""
        request = self._open.get(request_id)
        if request is not None and request.uncomputed:
            self._groups[request.group].own_tokens -= request.uncomputed
            request.uncomputed = 0

    def ended(self, request_id: str) -> None:
        """A request is over, however it ended; unknown ones are ignored."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._groups[request.group].own_tokens -= request.uncomputed + REQUEST_TOKENS
