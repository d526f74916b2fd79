"""Stores which client gets the outputs of each request. Keys identify the requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dist_aclgraph.actors.wire.client_links import ClientLink
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.steps.delta import StepDeltas

NOBODY = -1
FIRST_CAPACITY = 64


class Recipients:
    """Stores which client waits for each request. Only the loop's thread uses this object.

    Each request has a key, which is a small integer. The key is the index of the request in arrays.
    Outputs that are not delivered yet can contain the key of a request that has ended. So another
    request gets a key only after all outputs of the ended request were delivered.
    """

    def __init__(self) -> None:
        self._key_of: dict[str, int] = {}
        self._links: list[ClientLink] = []
        # For each key, an index in ``_links``; NOBODY if no request has the key.
        self._link_of = np.full(FIRST_CAPACITY, NOBODY, np.int32)
        # For each key, the number that the client gave to the request.
        self._number_of = np.zeros(FIRST_CAPACITY, np.int32)
        self._free = list(range(FIRST_CAPACITY))
        # Keys of requests that have ended, but whose outputs may not be delivered yet.
        self._left: list[int] = []

    def add(self, request_id: str, link: ClientLink, number: int) -> int:
        """Record the client of a request; return the request's key."""
        if link not in self._links:
            self._links.append(link)
        if not self._free:
            self._grow()
        key = self._key_of[request_id] = self._free.pop()
        self._link_of[key], self._number_of[key] = self._links.index(link), number
        return key

    def is_owner(self, link: ClientLink, request_id: str) -> bool:
        key = self._key_of.get(request_id)
        return key is not None and self._links[self._link_of[key]] is link

    def find(self, request_id: str) -> tuple[ClientLink, int] | None:
        """Return the link of the client that waits for a request, and the number that the client
        gave to the request; None if no client waits.
        """
        key = self._key_of.get(request_id)
        return None if key is None else (self._links[self._link_of[key]], int(self._number_of[key]))

    def remove(self, request_id: str) -> None:
        key = self._key_of.pop(request_id)
        self._link_of[key] = NOBODY
        self._left.append(key)

    def pop(self, request_id: str) -> tuple[ClientLink, int]:
        """Remove a request. Return its client's link, and the number that the client gave to the
        request.
        """
        found = self.find(request_id)
        assert found is not None, "each request has a client"
        self.remove(request_id)
        return found

    def remove_link(self, link: ClientLink) -> list[str]:
        """Remove a link, and return the ids of its requests."""
        requests = [request_id for request_id in self._key_of if self.is_owner(link, request_id)]
        for request_id in requests:
            self.remove(request_id)
        if link in self._links:
            index = self._links.index(link)
            del self._links[index]
            self._link_of[self._link_of > index] -= 1
        return requests

    def remove_all(self) -> Iterator[tuple[ClientLink, int]]:
        """Remove all requests. For each request, yield its client's link, and the number that the
        client gave to the request.
        """
        for request_id in list(self._key_of):
            yield self.pop(request_id)

    def hand_out(self, outputs: StepOutputs) -> Iterator[tuple[ClientLink, StepDeltas]]:
        """Yield each client's deltas, and remove the requests that have ended."""
        if len(outputs):
            links = self._link_of[outputs.keys]
            numbers = self._number_of[outputs.keys]
            counts = np.bincount(links + 1, minlength=len(self._links) + 1)[1:]
            for index in np.flatnonzero(counts).tolist():
                if counts[index] == len(outputs):
                    yield self._links[index], outputs.deltas(numbers)
                else:
                    picked = np.flatnonzero(links == index)
                    yield self._links[index], outputs.deltas(numbers[picked], picked)
            for index in outputs.finish_reasons:
                if links[index] != NOBODY:
                    self.remove(outputs.requests[index].request_id)
        self._free += self._left
        self._left.clear()

    def _grow(self) -> None:
        capacity = len(self._link_of)
        self._free += range(capacity, 2 * capacity)
        nobody = np.full(capacity, NOBODY, np.int32)
        self._link_of = np.concatenate([self._link_of, nobody])
        self._number_of = np.concatenate([self._number_of, nobody])
