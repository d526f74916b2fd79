"""Simulates fetches of KV blocks between nodes, with the time limits of ``BlockFetches``.

The fetches of a group run one after another. Each fetch uses the full network rate
(``CopyRates.network``). If the workers of a group are on several nodes, all these nodes fetch at
the same time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from dist_aclgraph.actors.wire.block_fetches import LIMIT_S, QUEUE_S
from dist_aclgraph.kv.block_files import BLOCK_AGE_S
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import Answer, Files
from dist_aclgraph.simulate.files import SimulatedNode


@dataclass(order=True)
class _Fetch:
    """A fetch that runs or waits.

    Attributes:
        names: hashes of the blocks that the fetch adds to the node's files.
        depth: number of blocks before the first of these blocks in the prompt.
    """

    end_s: float
    names: Sequence[BlockHash] = field(compare=False)
    depth: int = field(compare=False)
    is_done: bool = field(default=False, compare=False)


class SimulatedFetches:
    """The fetches of one group.

    Args:
        node: the files of the node on which the group runs.
        block_s: number of seconds that it takes to fetch the files of one block.
        clock: a function that returns the group's time, in simulated seconds.

    Attributes:
        num_blocks: number of blocks that were fetched.
    """

    def __init__(self, node: SimulatedNode, block_s: float, clock: Callable[[], float]) -> None:
        self._node = node
        self._block_s = block_s
        self._clock = clock
        self._running: list[_Fetch] = []  # a heap
        self._free_s = 0.0  # the time at which the last fetch ends
        self.num_blocks = 0

    @property
    def next_end_s(self) -> float:
        """The time at which the next fetch ends; infinite if no fetch runs."""
        return self._running[0].end_s if self._running else math.inf

    def begin(self, source: SimulatedNode, names: Sequence[BlockHash], depth: int) -> Answer[bool]:
        """Begin to fetch blocks from the node ``source``; see ``FetchBlocks``."""
        now_s = self._clock()
        begin_s = max(now_s, self._free_s)
        if begin_s > now_s + QUEUE_S:
            fetch = _Fetch(now_s + QUEUE_S, (), depth)
        else:
            count = _count_whole(names, source.files)
            num_whole = min(count, int(LIMIT_S / self._block_s))
            took_s = min(count * self._block_s, LIMIT_S)
            fetch = _Fetch(begin_s + took_s, names[:num_whole], depth)
            self._free_s = fetch.end_s
        heapq.heappush(self._running, fetch)
        return lambda: fetch.is_done or None

    def advance(self, now_s: float) -> bool:
        """End the fetches whose end time has come. Return whether at least one fetch has ended."""
        has_ended = self.next_end_s <= now_s
        while self.next_end_s <= now_s:
            fetch = heapq.heappop(self._running)
            fetch.is_done = True
            for depth, name in enumerate(fetch.names, fetch.depth):
                self.num_blocks += self._node.add_fetched(name, fetch.end_s - depth * BLOCK_AGE_S)
            if fetch.names and self._node.has_states:
                self._node.write_state(fetch.names[-1])
        return has_ended


def _count_whole(names: Sequence[BlockHash], files: Files) -> int:
    """Return how many leading blocks a source has. If the model has recurrent state, count only up
    to the last block that also has a checkpoint.
    """
    count = sum(1 for _ in takewhile(files.has, names))
    if files.has_state is None:
        return count
    return next((n for n in range(count, 0, -1) if files.has_state(names[n - 1])), 0)
