"""WaitingRequests: the requests of a lockstep group that have no row."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

from dist_aclgraph.scheduler.request import Request


class WaitingRequests:
    """Owns the requests in the queue, the requests that wait for files, and the requests that wait
    for their grammars.

    Attributes:
        queue: the requests that can be admitted, in the order of deadlines.
    """

    def __init__(self) -> None:
        self.queue: deque[Request] = deque()
        # Requests that wait until the files of their blocks are looked up, or until blocks are
        # read.
        self._fetching: set[Request] = set()
        # Number of requests in ``_fetching`` on each data-parallel rank.
        self.num_fetching: Counter[int] = Counter()
        # Requests whose grammars are being compiled; the values are their last rank and row.
        self._compiling: dict[Request, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._compiling) + len(self._fetching)

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue."""
        for request in requests:
            insort(self.queue, request, key=_order)

    def remove(self, request: Request) -> None:
        """Remove a waiting request, whatever it waits for."""
        if request in self._fetching:
            self._fetching.remove(request)
            self.num_fetching[request.dp_rank] -= 1
        elif self._compiling.pop(request, None) is None:
            self.queue.remove(request)

    # ---- files

    @property
    def has_fetching(self) -> bool:
        """Whether at least one request waits for files."""
        return bool(self._fetching)

    @property
    def is_looking(self) -> bool:
        """Whether at least one request waits until its files are looked up."""
        return any(request.look_up is not None for request in self._fetching)

    def wait_for_files(self, request: Request) -> None:
        """Add a request to the requests that wait for files.

        The caller removes the request from the queue.
        """
        self._fetching.add(request)
        self.num_fetching[request.dp_rank] += 1

    def end_looking(self) -> None:
        """Move the requests whose files were looked up back to the queue."""
        self.end_fetching(
            [
                request
                for request in self._fetching
                if (look_up := request.look_up) is not None and look_up() is not None
            ]
        )

    def end_fetching(self, requests: Sequence[Request]) -> int:
        """If a request in ``requests`` waits for files, move the request back to the queue. Return
        how many requests were moved.
        """
        left = [request for request in requests if request in self._fetching]
        self._fetching.difference_update(left)
        self.num_fetching.subtract(request.dp_rank for request in left)
        self.add(left)
        return len(left)

    # ---- grammars

    @property
    def has_compiling(self) -> bool:
        """Whether at least one request waits for its grammar."""
        return bool(self._compiling)

    def wait_for_grammars(self, rows: Mapping[Request, int], dp_rank: int) -> None:
        """Let requests wait until the workers of a rank have compiled their grammars.

        Args:
            rows: the row that each of these requests had.
        """
        self._compiling |= {request: (dp_rank, row) for request, row in rows.items()}

    def end_compiling(self, compiling: Sequence[Collection[int]]) -> None:
        """Move the requests whose grammars are compiled back to the queue.

        Args:
            compiling: for each data-parallel rank, the rows whose grammars are not compiled yet.
        """
        waits = self._compiling.items()
        self._end_compiling([each for each, (rank, row) in waits if row not in compiling[rank]])

    def try_grammars(self) -> int:
        """Put all requests that wait for grammars back into the queue; return the number of these
        requests. These requests will run one token in each step; see ``Request.tries_grammar``.
        """
        requests = list(self._compiling)
        for request in requests:
            request.tries_grammar = True
        self._end_compiling(requests)
        return len(requests)

    def _end_compiling(self, requests: Sequence[Request]) -> None:
        for request in requests:
            del self._compiling[request]
        self.add(requests)


def _order(request: Request) -> tuple[int, int]:
    return request.order
