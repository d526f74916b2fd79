"""Clients receive the outputs of a step in columns, one row per request. Each request gets its own
deltas.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.engine.recipients import Recipients
from dist_aclgraph.actors.host.liveness import Silence
from dist_aclgraph.actors.wire.client_links import ClientLink
from dist_aclgraph.actors.wire.messages import Deltas, encoder, from_engine_decoder
from dist_aclgraph.arrays.ints import pack_ints
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.scheduler.outputs import StepOutputs
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.delta import Note, RequestDelta, StepDeltas
from dist_aclgraph.steps.step import RowLogprobs, RowSampling

NUM_CLIENTS = 3


def make_link(name: str) -> ClientLink:
    return ClientLink(name.encode(), name, Silence(1.0))


def make_request(name: str, num_cached: int = 0) -> Request:
    request = Request(name, [1, 2], RowSampling())
    request.num_cached_tokens = num_cached
    return request


def make_outputs(
    requests: list[Request], counts: list[int], finished: dict[int, str], *, reports: bool = False
) -> StepOutputs:
    tokens = np.arange(100, 100 + sum(counts), dtype=np.int32)
    is_plain = set(counts) <= {1}
    return StepOutputs(
        requests,
        np.array([request.key for request in requests], np.int32),
        tokens,
        None if is_plain else np.cumsum(counts, dtype=np.int32),
        np.flatnonzero([request.num_cached_tokens > 0 for request in requests]),
        finished,
        tuple(RowLogprobs(pack_ints([t]), (-0.5,), 1) for t in tokens.tolist()) if reports else (),
    )


@given(st.data())
def test_each_client_gets_its_own_requests_whole(data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(-1, NUM_CLIENTS - 1), min_size=1, max_size=100))
    most = data.draw(st.sampled_from([1, 3]))
    counts = [data.draw(st.integers(1, most)) for _ in owners]
    links = [make_link(str(i)) for i in range(NUM_CLIENTS)]
    recipients = Recipients()
    requests, names = [], [{} for _ in links]
    for index, owner in enumerate(owners):
        request = make_request(f"r{index}", index % 3)
        number = 1000 - index
        request.key = recipients.add(request.request_id, links[owner], number)
        if owner < 0:  # the request was aborted while the step ran
            recipients.remove(request.request_id)
        else:
            names[owner][number] = request.request_id
        requests.append(request)
    finished = dict.fromkeys(range(0, len(owners), 4), "stop")
    outputs = make_outputs(requests, counts, finished, reports=data.draw(st.booleans()))

    found: dict[int, list[RequestDelta]] = {i: [] for i in range(NUM_CLIENTS)}
    for link, step in recipients.hand_out(outputs):
        read = from_engine_decoder.decode(encoder.encode(Deltas(step, 1)))
        assert isinstance(read, Deltas)
        read.step.check_columns()
        found[int(link.client)] = list(read.step.each(names[int(link.client)]))

    everything = list(outputs)
    parts = np.split(outputs.token_ids, np.cumsum(counts)[:-1])
    assert [delta.tokens for delta in everything] == [part.tolist() for part in parts]
    for client, deltas in found.items():
        mine = [d for d, owner in zip(everything, owners, strict=True) if owner == client]
        assert deltas == mine
    left = {request_id for names_ in names for request_id in names_.values()}
    left -= {requests[index].request_id for index in finished}
    assert {link.client for link, _ in recipients.remove_all()} == {
        str(owners[int(name[1:])]) for name in left
    }


def test_a_key_is_given_again_only_when_outputs_that_may_have_it_are_handed_out() -> None:
    recipients, link = Recipients(), make_link("a")
    gone = make_request("gone")
    gone.key = recipients.add("gone", link, 1)
    outputs = make_outputs([gone], [1], {})
    recipients.remove("gone")

    others = {recipients.add(f"r{i}", link, i) for i in range(200)}

    assert gone.key not in others
    assert list(recipients.hand_out(outputs)) == []
    assert recipients.add("next", link, 300) == gone.key


def test_the_end_of_a_link_removes_only_its_own_requests() -> None:
    recipients, first, second = Recipients(), make_link("a"), make_link("b")
    one, other = make_request("one"), make_request("other")
    one.key, other.key = recipients.add("one", first, 5), recipients.add("other", second, 5)

    assert recipients.remove_link(first) == ["one"]

    [(link, step)] = recipients.hand_out(make_outputs([one, other], [1, 1], {}))
    assert link is second
    [delta] = step.each({5: "other"})
    assert (delta.request_id, delta.tokens) == ("other", [101])
    assert not recipients.is_owner(first, "one")
    assert recipients.remove_link(first) == []


TWO = pack_ints([3, 4])


@pytest.mark.parametrize(
    "step",
    [
        StepDeltas(b"123"),
        StepDeltas(TWO, pack_ints([9])),
        StepDeltas(TWO, pack_ints([9, 9]), pack_ints([2])),
        StepDeltas(TWO, pack_ints([9, 9]), pack_ints([3, 2])),
        StepDeltas(TWO, pack_ints([9, 9]), pack_ints([-1, 2])),
        StepDeltas(TWO, pack_ints([9, 9]), notes=(Note(2),)),
        StepDeltas(TWO, pack_ints([9, 9]), logprobs=(None,)),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(step: StepDeltas) -> None:
    with pytest.raises(NotAMessageError):
        step.check_columns()
