"""Chooses the lockstep group of a request. The choice depends on the prefixes that the groups have
cached, and on the work that waits at the groups.

An ingress does not see the caches of the groups. For each group, the ingress remembers the prefixes
that it has sent to the group, up to the size of the group's cache. For each group, the replicas of
the ingress send each other only one number: how many tokens of their own requests wait at the
group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dist_aclgraph.arrays.ints import INT_BYTES
from dist_aclgraph.kv.block_pool import hash_block, salted_root
from dist_aclgraph.kv.checkpoints import BlockHash

# For each open request, the router counts this number of waiting tokens, because the request runs
# in every step until its end. The router adds the tokens of the request's prompt that are not
# computed yet.
REQUEST_TOKENS = 64
# The weight of a cached token. The weight is 2, because a cached token saves time for its request,
# and also for the requests that wait behind this request.
WORTH_OF_CACHED = 2


def choose_group(waiting: Sequence[int], cached: Sequence[int], first: int = 0) -> int:
    """Return the index of the group with the smallest ``waiting - WORTH_OF_CACHED * cached``.

    So one cached token of the prompt outweighs ``WORTH_OF_CACHED`` waiting tokens. If several
    groups have the smallest value, the group with the most cached tokens is chosen. If several of
    these groups have equally many cached tokens, the first of them is chosen, counting from the
    group ``first``.

    Args:
        waiting: number of tokens that wait at each group; at least one group.
        cached: for each group, how many of the prompt's tokens are in the group's cache.
        first: index of the group that is preferred among equal groups."""
    count = len(waiting)
    return min(
        range(count),
        key=lambda i: (waiting[i] - WORTH_OF_CACHED * cached[i], -cached[i], (i - first) % count),
    )


def block_hashes(prompt: bytes, cache_salt: str, tokens_per_block: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of a prompt that can be in a prefix cache.

    As in the scheduler, the prompt's last token is never taken from the cache, because its logits
    are needed.

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
    """The block hashes of the prompts that were sent to a group.

    The maximum number of hashes is the number of blocks in the group's cache. If there are more
    hashes, the least recently used hashes are dropped. The real contents of the group's cache may
    differ.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._known: OrderedDict[BlockHash, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._known)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of ``hashes`` are remembered."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._known:
                return count
        return len(hashes)

    def note(self, hashes: Sequence[BlockHash]) -> None:
        """Remember blocks that the group will compute, or find in its cache."""
        # The last blocks of a prompt are dropped first, because a block is useless if a block
        # before it was dropped.
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
    """Return two values: the prompt's block hashes for each block size, and the number of cached
    prompt tokens for each group.

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
    uncomputed: int  # number of prompt tokens that are not computed yet


@dataclass
class RoutedCounts:
    """Counts of the requests that this router has sent to a group.

    Attributes:
        routed_requests: number of requests.
        routed_prompt_tokens: number of prompt tokens of these requests.
        routed_cached_tokens: number of these prompt tokens that the router assumed to be in the
            group's cache.
    """

    routed_requests: int = 0
    routed_prompt_tokens: int = 0
    routed_cached_tokens: int = 0


@dataclass
class RequestRouter:
    """Owns the open requests of one ingress, and the estimated load and cache of each group.

    Args:
        first: index of the group that is preferred among equal groups. Each replica of the ingress
            has a different value, so that the replicas begin with different groups.
    """

    first: int = 0
    counts: dict[str, RoutedCounts] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)

    def add(self, group: str, cache_blocks: int, tokens_per_block: int) -> None:
        """Add a group, or change the cache size of a known group. Cache sizes may differ."""
        known = self._groups.get(group)
        if known is None:
            self._groups[group] = _Group(PrefixMemory(cache_blocks), tokens_per_block)
            self.counts.setdefault(group, RoutedCounts())
            return
        known.memory.num_blocks = cache_blocks
        if known.tokens_per_block != tokens_per_block:  # the hashes were for blocks of another size
            known.tokens_per_block = tokens_per_block
            known.memory.clear()

    def remove(self, group: str) -> None:
        """Remove a group. Call this after all requests of the group have ended."""
        self._groups.pop(group, None)
        self.counts.pop(group, None)

    def forget_cache(self, group: str) -> None:
        """Reset a group that was started again: its cache is empty, and no request waits there."""
        known = self._groups[group]
        known.memory.clear()
        known.others_tokens = 0

    def hear(self, group: str, others_tokens: int) -> None:
        """Set how many tokens of other ingress replicas' requests wait at a group."""
        self._groups[group].others_tokens = others_tokens

    def load(self, group: str) -> int:
        """Return how many tokens of this router's requests wait at a group."""
        return self._groups[group].own_tokens

    def route(self, request_id: str, prompt: bytes, cache_salt: str, among: Collection[str]) -> str:
        """Choose a group for a request, and count the request's tokens as waiting at this group.

        Args:
            prompt: int32 [num_prompt_tokens].
            among: names of the groups that accept requests; at least one.
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
        """Return the names of the files for the blocks of a prompt that can be in a prefix cache.

        Args:
            prompt: int32 [num_prompt_tokens].
        """
        sizes = {group.tokens_per_block for group in self._groups.values()}
        return [each.hex() for size in sizes for each in block_hashes(prompt, cache_salt, size)]

    def uncached(self, prompt: bytes, cache_salt: str, among: Collection[str]) -> int:
        """Return how many of a prompt's tokens would be computed by the group that has cached the
        longest prefix.

        Args:
            prompt: int32 [num_prompt_tokens].
            among: names of the groups that are compared; at least one.
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
        """Return two values. The first value says whether a prefill group computes the prompt for
        another group. The second value contains the groups to which the request can be sent now. If
        all groups have the same role, any group can run the whole request.

        Args:
            prompt: int32 [num_prompt_tokens].
            prefill_from: the groups that accept requests. For a prefill group, the value is a
                minimum: the group gets only prompts with at least this number of uncached tokens.
                For other groups, the value is 0.
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
        """Record that a request has got its first token, so that its prompt is computed."""
        request = self._open.get(request_id)
        if request is not None and request.uncomputed:
            self._groups[request.group].own_tokens -= request.uncomputed
            request.uncomputed = 0

    def ended(self, request_id: str) -> None:
        """Record that a request has ended, for whatever reason. Unknown requests are ignored."""
        request = self._open.pop(request_id, None)
        if request is not None:
            self._groups[request.group].own_tokens -= request.uncomputed + REQUEST_TOKENS
