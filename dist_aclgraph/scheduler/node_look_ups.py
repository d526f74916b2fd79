"""NodeLookUps: lets workers look up files on nodes other than the engine's node.

The workers of a data-parallel rank can be on several nodes, and each node has only the files of its
own workers. On each node except the engine's node, one worker looks up the files. If another group
has computed the blocks, the worker also fetches missing files from that group. The engine sends
these look-ups in its messages about copy jobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.kv.checkpoints import BlockHash
from dist_aclgraph.kv.look_ups import Answer, Source
from dist_aclgraph.steps.copies import CopyJob


@dataclass
class _LookUp:
    """A running look-up of block files on nodes other than the engine's node.

    Attributes:
        waits_for: the workers that have not answered yet.
        num_found: the smallest number of leading blocks that a worker has found until now.
        source: the group from which missing blocks are fetched; None if nothing is fetched.
    """

    waits_for: set[int]
    num_found: int
    source: Source | None


class NodeLookUps:
    """Owns the look-ups of one data-parallel rank on nodes other than the engine's node.

    Args:
        finders: the workers that look up files; see ``GroupFiles.finders``.
        is_beside_engine: whether a worker of the data-parallel rank is on the engine's node.
        only_workers: see ``GroupFiles``.

    Attributes:
        covers_engine: whether the workers also look up the files on the engine's node.
    """

    def __init__(
        self,
        finders: Collection[int] = (),
        *,
        is_beside_engine: bool = True,
        only_workers: bool = False,
    ) -> None:
        self.is_beside_engine = is_beside_engine
        self.covers_engine = only_workers or not is_beside_engine
        self._finders = finders
        self._running: dict[int, _LookUp] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def must_ask(self, source: Source | None) -> bool:
        """Return whether the other nodes must look up files. The other nodes must look up files if
        they may have to fetch blocks, or if the engine's node has no files of this rank. In all
        other cases, a look-up on the engine's node is enough: the other nodes usually have files of
        the same blocks.
        """
        return bool(self._finders) and not (source is None and self.is_beside_engine)

    def begin(
        self, number: int, hashes: Sequence[BlockHash], first: int, source: Source | None
    ) -> tuple[CopyJob, Answer[int]]:
        """Begin a look-up. Return the job for the workers, and a function that returns the result:
        the number of leading blocks that all nodes have, plus ``first``; None until all workers
        have answered.
        """
        found = _LookUp(set(self._finders), len(hashes), source)
        self._running[number] = found
        depths = pack_ints(range(first, first + len(hashes)))
        message = b"" if source is None else source.message
        job = CopyJob(number, "find", b"", b"".join(hashes), depths, source=message)
        return job, lambda: None if found.waits_for else first + found.num_found

    def end(self, number: int, rank: int, num_found: int) -> bool:
        """Record a worker's answer; return whether all workers have now answered the look-up.
        Answers to other jobs, and answers of workers that were not asked, are ignored.
        """
        found = self._running.get(number)
        if found is None or rank not in found.waits_for:
            return False
        found.waits_for.remove(rank)
        found.num_found = min(found.num_found, num_found)
        if found.waits_for:
            return False
        del self._running[number]
        return True

    def take_cancelled(self) -> list[CopyJob]:
        """Drop each look-up that fetches blocks for which no request waits any longer. Return the
        jobs that cancel these look-ups and fetches on the workers.
        """
        sources = [(number, found.source) for number, found in self._running.items()]
        cancelled = [n for n, source in sources if source is not None and not source.is_wanted()]
        for number in cancelled:
            del self._running[number]
        return [CopyJob(number, "cancel", b"", b"", b"") for number in cancelled]

    def forget(self) -> None:
        """End all look-ups, because the workers have dropped them or do not answer. Each of these
        look-ups then returns that no blocks were found. Later answers are ignored.
        """
        for found in self._running.values():
            found.waits_for.clear()
            found.num_found = 0
        self._running.clear()


def smallest(answers: Sequence[Answer[int]]) -> int | None:
    """Return the smallest result of several look-ups; None until all look-ups have ended."""
    found = [answer() for answer in answers]
    known = [count for count in found if count is not None]
    return min(known) if len(known) == len(found) else None
