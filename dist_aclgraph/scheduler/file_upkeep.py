"""FileUpkeep: decides which files of KV blocks are deleted, and which files are touched.

A block's file is deleted if the block might contain NaN. Such a file exists if a block was written
to its file before the request's logits contained NaN.

A tier deletes the files that were least recently used. While a prefix is in the device's cache, its
files are not read, even if many requests use the prefix. To keep such files, a job updates
("touches") the time of last use of some of them every ``TOUCH_S`` seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from dist_aclgraph.kv.checkpoints import BlockHash

MAX_CONDEMNED = 4096  # maximum number of blocks that are recorded for deletion
MAX_TOUCHED = 512  # maximum number of blocks whose files get a new time of last use in one job
TOUCH_S = 10.0  # minimum number of seconds between the starts of two jobs that touch files


class FileUpkeep:
    """Owns the hashes of the blocks whose files must be deleted, and the hashes of the blocks whose
    files must get a new time of last use.
    """

    def __init__(self) -> None:
        # Keys: hashes of blocks whose files must be deleted, the oldest first. Values: whether a
        # job already deletes the block's files.
        self._condemned: dict[BlockHash, bool] = {}
        # Keys: hashes of cached blocks with which requests have started. Values: number of blocks
        # before the block in its prompt.
        self._used: dict[BlockHash, int] = {}
        self._used_states: dict[BlockHash, None] = {}

    def condemn(self, hashes: Sequence[BlockHash]) -> None:
        """Mark the files of blocks for deletion. From now on, no request reads these files."""
        for block_hash in hashes:
            self._condemned.pop(block_hash, None)
        self._condemned |= dict.fromkeys(hashes, False)
        while len(self._condemned) > MAX_CONDEMNED:
            del self._condemned[next(iter(self._condemned))]

    def is_condemned(self, block_hash: BlockHash) -> bool:
        return block_hash in self._condemned

    def take_condemned(self, busy: Collection[BlockHash]) -> list[BlockHash]:
        """Return the blocks whose files must be deleted now. The caller calls ``end_deletion`` when
        the files are deleted.

        Args:
            busy: blocks that are being copied now. Their files are deleted later.
        """
        waiting = [
            each for each, is_taken in self._condemned.items() if not is_taken and each not in busy
        ]
        self._condemned |= dict.fromkeys(waiting, True)
        return waiting

    @property
    def has_condemned(self) -> bool:
        """Whether files wait to be deleted."""
        return not all(self._condemned.values())

    def end_deletion(self, hashes: Sequence[BlockHash], *, is_done: bool) -> None:
        """Record that a job that deletes files of these blocks has ended.

        Args:
            is_done: true if the job has deleted the files, false if the job was dropped.
        """
        for block_hash in hashes:
            if not self._condemned.get(block_hash):
                continue  # The file was marked for deletion again during the job.
            if is_done:
                del self._condemned[block_hash]
            else:
                self._condemned[block_hash] = False

    def note_used(self, hashes: Sequence[BlockHash], state: BlockHash | None) -> None:
        """Record that a request starts with the cached blocks ``hashes``, so that a later job
        touches their files.

        Args:
            state: hash of the last of these blocks, which identifies the request's checkpoint; None
                for a model without recurrent state.
        """
        room = MAX_TOUCHED - len(self._used)
        if room > 0:
            self._used.update(islice(zip(hashes, range(len(hashes)), strict=True), room))
            if state is not None:
                self._used_states[state] = None

    def take_used(self) -> tuple[dict[BlockHash, int], list[BlockHash]]:
        """Remove and return the values that ``note_used`` has recorded: a dictionary of blocks, and
        the hashes that identify checkpoints. In the dictionary, the keys are hashes of blocks, and
        the values are the blocks' numbers of preceding blocks.
        """
        used, self._used = self._used, {}
        states, self._used_states = list(self._used_states), {}
        return used, states
