"""Checkpoints: copies of recurrent states. A later request with the same prefix starts from such a
copy.

Layers with linear attention store no keys. Such layers store one state for each request, and every
token changes this state. So a request can share a prefix only up to a position where the state was
copied to a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dist_aclgraph.config import Config
from dist_aclgraph.context.state_slots import num_checkpoints
from dist_aclgraph.errors import KVCacheError

BlockHash = bytes


class Checkpoints:
    """Owns the checkpoints of one rank. Each checkpoint has a number from 0 to ``count - 1``. The
    key of a checkpoint is the hash of the last block before the checkpoint's position. This class
    knows nothing about requests or devices.

    Every checkpoint is either free, begun or stored. Begun means that a step in flight writes the
    checkpoint. Stored means that ``longest`` can find the checkpoint. If a new checkpoint is needed
    and none is free, the least recently used stored checkpoint becomes free.

    Args:
        count: number of checkpoints; if it is 0, requests share no prefixes.
        interval: number of blocks between two checkpoints of a long prompt.
    """

    def __init__(self, count: int, interval: int) -> None:
        if count < 0 or interval < 1:
            raise KVCacheError(f"{count} checkpoints, one after {interval} blocks, are impossible")
        self.count = count
        self.interval = interval
        self.clear()

    def clear(self) -> None:
        """Free all checkpoints, for example after the device has lost their contents."""
        self._free = list(range(self.count - 1, -1, -1))
        self._stored: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._begun: dict[BlockHash, int] = {}
        # The keys are checkpoints that a copy job reads. A value says whether ``release`` must free
        # the checkpoint.
        self._held: dict[int, bool] = {}

    def next_position(self, num_computed: int, num_tokens: int, block_size: int) -> int:
        """Return the first position after ``num_computed`` at which a prompt's state is copied to a
        checkpoint. Positions are counted in tokens.

        The state is copied at each multiple of the interval, and at the beginning of the block that
        contains the prompt's last token. Returns ``num_tokens`` if there is no such position.
        """
        if not self.count:
            return num_tokens
        last = (num_tokens - 1) // block_size * block_size
        step = self.interval * block_size
        following = (num_computed // step + 1) * step
        return min((p for p in (following, last) if num_computed < p <= last), default=num_tokens)

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """Find the last stored checkpoint of a prefix. Return the number of blocks before this
        checkpoint; 0 if no checkpoint is stored.
        """
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._stored:
                return count
        return 0

    def use(self, block_hash: BlockHash) -> int:
        """Return the number of a stored checkpoint, and mark it as the most recently used."""
        self._stored.move_to_end(block_hash)
        return self._stored[block_hash]

    def begin(self, block_hash: BlockHash) -> int | None:
        """Return the number of a checkpoint that a step may write. Return None if this prefix
        already has a checkpoint, or if no checkpoint can be made free.

        A request of the same step may start from the old contents of this checkpoint. So the step
        must finish all reads of checkpoints before its first write.
        """
        if block_hash in self._stored or block_hash in self._begun:
            return None
        if self._free:
            checkpoint = self._free.pop()
        else:
            oldest = next((h for h, c in self._stored.items() if c not in self._held), None)
            if oldest is None:
                return None
            checkpoint = self._stored.pop(oldest)
        self._begun[block_hash] = checkpoint
        return checkpoint

    def store(self, block_hash: BlockHash) -> None:
        """Change a checkpoint from begun to stored, because the step that writes it has ended."""
        self._stored[block_hash] = self._begun.pop(block_hash)

    def drop(self, block_hash: BlockHash) -> None:
        """Free a begun checkpoint, because its step was undone, or its request was removed."""
        self._free.append(self._begun.pop(block_hash))

    def forget(self, block_hash: BlockHash) -> None:
        """Free a stored checkpoint, because its block was evicted from the prefix cache."""
        checkpoint = self._stored.pop(block_hash, None)
        if checkpoint in self._held:
            self._held[checkpoint] = True
        elif checkpoint is not None:
            self._free.append(checkpoint)

    def hold(self, block_hash: BlockHash) -> int | None:
        """Return the number of a stored checkpoint, whose contents stay until ``release`` is
        called. Return None if no checkpoint with this hash is stored, or if the checkpoint is
        already held.
        """
        checkpoint = self._stored.get(block_hash)
        if checkpoint is None or checkpoint in self._held:
            return None
        self._held[checkpoint] = False
        return checkpoint

    def release(self, checkpoint: int) -> None:
        """End ``hold``. If the checkpoint's block was evicted since ``hold`` was called, free the
        checkpoint.
        """
        if self._held.pop(checkpoint):
            self._free.append(checkpoint)


def make_checkpoints(config: Config, *, has_state: bool) -> Checkpoints | None:
    """Return one rank's checkpoints, all of them free; None if the model has no recurrent state."""
    if not has_state:
        return None
    interval = -(-config.kv.checkpoint_interval // config.kv.block_size)
    return Checkpoints(num_checkpoints(config), interval)
