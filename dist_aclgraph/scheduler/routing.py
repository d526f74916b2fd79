"""Chooses the lockstep group of a request, by the cached prefix and the waiting work.

An ingress does not see the caches of the groups. For each group, the ingress remembers the prefixes
that it has sent to the group, up to the size of the group's cache. For each group, replicas of the
ingress send each other only one number: the number of tokens of their requests that wait at the
group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.ints import INT_BYTES
from dist_aclgraph.kv.block_pool import hash_block, salted_root
from dist_aclgraph.kv.checkpoints import BlockHash

# The router adds this number of tokens for each open request to the uncomputed tokens of its
# prompt, because the request runs in every step until its end.
REQUEST_TOKENS = 64
# The factor of cached tokens is 2, because a cached token saves time for this request, and also for
# the requests that wait behind it.
WORTH_OF_CACHED = 2


def choose_group(waiting: Sequence[int], cached: Sequence[int], first: int = 0) -> int:
    """Return the index of the group with the smallest ``waiting - WORTH_OF_CACHED * cached``.

    So a group with the request's prefix is chosen even if it has up to ``WORTH_OF_CACHED * cached``
    more waiting tokens than the least loaded group. Among equal groups, the group with more cached
    tokens is chosen, then the next group from ``first`` on.

    Args:
        waiting: number of tokens that wait at each group; at least one group.
        cached: number of the prompt's tokens that each group has in its cache.
        first: index of the preferred group among equal groups.
    """
    count = len(waiting)
    return min(
        range(count),
        key=lambda i: (waiting[i] - WORTH_OF_CACHED * cached[i], -cached[i], (i - first) % count),
    )


def block_hashes(prompt: bytes, cache_salt: str, tokens_per_block: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of a prompt that a prefix cache can supply.

    As in the scheduler, the last token never comes from the cache, because its logits are needed.

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
    """The hashes of blocks that were sent to a group.

    The memory holds at most one hash for each block of the group's cache. When it is full, the
    least recently used hashes are dropped. The real contents of the cache may differ.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._known: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks whose hashes are in the memory."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._known:
                return count
        return len(hashes)

    def note(self, hashes: Sequence[BlockHash]) -> None:
        """Record blocks that the group will compute or reuse."""
        # The last blocks are dropped first, because a block is useless if a block before it was
        # dropped.
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


def _look_up(
    groups: Sequence[_Group], prompt: bytes, cache_salt: str
) -> tuple[dict[int, list[BlockHash]], list[int]]:
    """Return a prompt's block hashes for each size of blocks, and its cached tokens in each group.

    Args:
        prompt: int32 [num_prompt_tokens].
    """
    sizes = {group.tokens_per_block for group in groups}
    hashes = {size: block_hashes(prompt, cache_salt, size) for size in sizes}
    cached = [
        group.memory.match(hashes[group.tokens_per_block]) * group.tokens_per_block
        for group in groups
    ]
    return hashes, cached


@dataclass
class _Open:
    group: str
    uncomputed: int  # number of prompt tokens that are still to be computed


@dataclass
class RoutedCounts:
    """Counts of the requests that this router has sent to a group.

    Attributes:
        routed_requests: number of requests.
        routed_prompt_tokens: number of prompt tokens of these requests.
        routed_cached_tokens: number of prompt tokens that were in the group's cache, as the router
            assumed.
    """

    routed_requests: int = 0
    routed_prompt_tokens: int = 0
    routed_cached_tokens: int = 0


@dataclass
class RequestRouter:
    """Owns the open requests of one ingress, and the estimated load and cache of each group.

    Args:
        first: index of the preferred group among equal groups. Each replica has another value, so
            that not all replicas begin with the same group.
    """

    first: int = 0
    counts: dict[str, RoutedCounts] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)

    def add(self, group: str, cache_blocks: int, tokens_per_block: int) -> None:
        """Add a group, or change the size of a known group's cache. Sizes can differ by group."""
        known = self._groups.get(group)
        if known is None:
            self._groups[group] = _Group(PrefixMemory(cache_blocks), tokens_per_block)
            self.counts.setdefault(group, RoutedCounts())
            return
        known.memory.num_blocks = cache_blocks
        if known.tokens_per_block != tokens_per_block:  # hashes of blocks of another size are wrong
            known.tokens_per_block = tokens_per_block
            known.memory.clear()

    def remove(self, group: str) -> None:
        """Remove a group after all of its requests have ended."""
        self._groups.pop(group, None)
        self.counts.pop(group, None)

    def forget_cache(self, group: str) -> None:
        """Reset a group that was started again: the group's cache is empty, and no request waits at
        the group.
        """
        known = self._groups[group]
        known.memory.clear()
        known.others_tokens = 0

    def hear(self, group: str, others_tokens: int) -> None:
        """Set how many tokens of other replicas' requests wait at a group."""
        self._groups[group].others_tokens = others_tokens

    def load(self, group: str) -> int:
        """Return how many tokens of this router's requests wait at a group."""
        return self._groups[group].own_tokens

    def route(self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]) -> str:
        """Choose a group for a request, and count the request there.

        Args:
            prompt: int32 [num_prompt_tokens].
            among: names of the groups that accept requests, at least one.
        """
        names = list(among)
        groups = [self._groups[name] for name in names]
        hashes, cached = _look_up(groups, prompt, cache_salt)
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

    def block_names(self, prompt: bytes, cache_salt: str) -> list[str]:
        """Return the names of the files with the blocks of a prompt that a prefix cache can supply.

        Args:
            prompt: int32 [num_prompt_tokens].
        """
        sizes = {group.tokens_per_block for group in self._groups.values()}
        return [each.hex() for size in sizes for each in block_hashes(prompt, cache_salt, size)]

    def uncached(self, prompt: bytes, cache_salt: str, among: Collection[str]) -> int:
        """Return the number of a prompt's tokens that the group with the longest cached prefix
        would compute.

        Args:
            prompt: int32 [num_prompt_tokens].
            among: names of groups, at least one.
        """
        _, cached = _look_up([self._groups[name] for name in among], prompt, cache_salt)
        return len(prompt) // INT_BYTES - max(cached)

    def for_role(
        self,
        prompt: bytes,
        cache_salt: str,
        prefill_from: Mapping[str, int],
        *,
        may_hand_over: bool = True,
    ) -> tuple[bool, Collection[str]]:
        """Return whether a prefill group computes the prompt for another group, and the groups that
        can do the work. If all groups have the same role, they do the work of both roles.

        Args:
            prompt: int32 [num_prompt_tokens].
            prefill_from: the groups that accept requests. The value of a prefill group is the
                minimum number of uncached tokens of its prompts; the value of other groups is 0.
        """
        prefill = [name for name, minimum in prefill_from.items() if minimum]
        others = [name for name, minimum in prefill_from.items() if not minimum]
        if not prefill or not others:
            return False, prefill_from.keys()
        if not may_hand_over:
            return False, others
        if self.uncached(prompt, cache_salt, others) < min(prefill_from[name] for name in prefill):
            return False, others
        return True, prefill

    def begun(self, request_id: str) -> None:
        """Record that a request has its first token, which means that its prompt is computed."""
        request = self._open.get(request_id)
        if request is not None and request.uncomputed:
            self._groups[request.group].own_tokens -= request.uncomputed
            request.uncomputed = 0

    def ended(self, request_id: str) -> None:
        """Record the end of a request, for any reason; unknown requests are ignored."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._groups[request.group].own_tokens -= request.uncomputed + REQUEST_TOKENS
