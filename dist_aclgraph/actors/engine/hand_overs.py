"""HandOvers: requests whose prompt this group computes, and which another group continues.

The group computes the prompt and the first token, and sends the token at once. Then the group
writes the prompt's blocks to files. When all writes have ended, with or without success, the group
tells the client that the request has ended. Then the client submits the request to another group,
which reads the prompt's KV from these files.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from dist_aclgraph.actors.engine.recipients import Recipients
from dist_aclgraph.actors.wire.client_links import ClientLink
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.scheduler.group_copies import GroupCopies
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.delta import Note, StepDeltas


class HandOvers:
    """Owns the requests that wait until their blocks are copied. The first token of each of these
    requests was already sent to its client.
    """

    def __init__(self, copies: GroupCopies, recipients: Recipients) -> None:
        self._copies = copies
        self._recipients = recipients
        # Each request is stored with its client's link, and the number that the client gave to the
        # request. The id does not suffice, because a later request can have the same id.
        self._waiting: list[tuple[Request, tuple[ClientLink, int] | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, outputs: StepOutputs) -> StepOutputs:
        """Store the requests that have ended in this group, but that another group will continue.
        Return the outputs without the finish reasons of these requests, so that their clients keep
        waiting.
        """
        kept = {
            index
            for index, reason in outputs.finish_reasons.items()
            if reason == "length" and outputs.requests[index].hands_over
        }
        if not kept:
            return outputs
        requests = [outputs.requests[index] for index in kept]
        self._waiting += ((each, self._recipients.find(each.request_id)) for each in requests)
        reasons = {i: reason for i, reason in outputs.finish_reasons.items() if i not in kept}
        return replace(outputs, finish_reasons=reasons)

    def take_ready(self) -> Iterator[tuple[ClientLink, StepDeltas]]:
        """For each request whose blocks were written since the last call, yield two values: the
        client's link, and the delta that ends the request.
        """
        waiting, self._waiting = self._waiting, []
        for request, client in waiting:
            if client is None or self._recipients.find(request.request_id) != client:
                continue  # the client has left, or has aborted the request
            if not self._copies.have_ended(request):
                self._waiting.append((request, client))
                continue
            link, number = self._recipients.pop(request.request_id)
            note = Note(0, finish_reason="length")
            yield link, StepDeltas(pack_ints([number]), ends=pack_ints([0]), notes=(note,))
