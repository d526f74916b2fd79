"""Drafting is compared with a plain loop over requests. A module with predictable results replaces
the next-token module.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.drafts.drafting import Drafter, DraftPass, count_accepted
from dist_aclgraph.graphs.step_buffers import DraftInputs
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.steps.references import References

VOCAB = 50
tokens = st.integers(0, 2)


def ints(values: object, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_drafts_count_up_to_the_first_wrong_one(npu: Npu, data: st.DataObject) -> None:
    k, num_reqs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    rows = st.lists(tokens, min_size=k + 1, max_size=k + 1)
    sampled = data.draw(st.lists(rows, min_size=num_reqs, max_size=num_reqs))
    drafted = [row[:k] for row in data.draw(st.lists(rows, min_size=num_reqs, max_size=num_reqs))]
    most = data.draw(st.lists(st.sampled_from((0, k)), min_size=num_reqs, max_size=num_reqs))
    found = count_accepted(
        ints(sampled, npu.device), ints(drafted, npu.device), ints(most, npu.device)
    )
    expected = []
    for target, draft, limit in zip(sampled, drafted, most, strict=True):
        count = 0
        while count < limit and target[count] == draft[count]:
            count += 1
        expected.append(count)
    assert found.cpu().tolist() == expected


class Recorder:
    """Stands for a next-token module. It returns ``hidden + token + 1``, and records its writes to
    the cache.

    It checks that each place attends only to positions that were written before.

    Args:
        requests: for each sampled request, the first position whose cache is checked, and the slot
            of position 0.
    """

    def __init__(self, requests: list[tuple[int, int]], num_places: int) -> None:
        self._requests, self._num_places = requests, num_places
        self.cache: dict[int, tuple[int, int]] = {}  # (position, token) of each slot

    def run(self, over: DraftPass) -> Tensor:
        places = (over.token_ids.tolist(), over.positions.tolist(), over.written.tolist())
        for token, position, slot in zip(*places, strict=True):
            if slot >= 0:
                self.cache[slot] = (position, token)
        if over.iteration:
            for position, first, base in zip(places[1], *self._places(), strict=True):
                assert self.cache.keys() >= set(range(base + first, base + position + 1))
        return over.hidden + over.token_ids.unsqueeze(1) + 1

    def _places(self) -> tuple[list[int], list[int]]:
        """Return two lists with one entry per place: the first checked position of the place's
        request, and the slot of the request's position 0.
        """
        places = [request for request in self._requests for _ in range(self._num_places)]
        return [first for first, _ in places], [slot for _, slot in places]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0].long() % VOCAB, VOCAB).float()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_proposals_go_on_behind_the_last_right_draft(k: int) -> None:
    cpu = torch.device("cpu")
    drafter = Drafter(k, 4, VOCAB, cpu)
    q = k + 1
    # Row 2 verifies drafts from position 10 on. Row 0 computes a prompt of three tokens, which ends
    # at position 2.
    right, hidden_of = 1, 7.0
    sampled_row = [20 + i for i in range(q)]
    drafts = [sampled_row[0]] * right + [49] * (k - right)
    drafter.drafts[2] = ints(drafts, cpu)
    positions = [*range(10, 10 + q), 0, 1, 2]
    recorder = Recorder([(10, 100), (2, 200)], q)
    inputs = DraftInputs(
        rows=ints([2, 0], cpu),
        most=ints([k, 0], cpu),
        positions=ints([range(10, 10 + q), range(2, 2 + q)], cpu),
        slots=ints([range(110, 110 + 2 * k), range(202, 202 + 2 * k)], cpu),
        places=ints([*range(q), *[q + 2] * q], cpu),
    )
    sampled = ints([sampled_row, [30] * q], cpu)
    accepted = drafter.count(sampled, inputs)
    drafter.propose(
        recorder.logits,
        recorder.run,
        ints([*sampled_row, 5, 6, 30], cpu),
        ints(positions, cpu),
        ints([*range(110, 110 + q), 200, 201, 202], cpu),
        torch.full((q + 3, 1), hidden_of),
        sampled,
        accepted,
        inputs,
    )
    assert accepted.tolist() == [right, 0]
    for row, token, at, slot in ((2, sampled_row[right], 10 + right, 110 + right), (0, 30, 2, 202)):
        hidden, expected = hidden_of, []
        for step in range(k):
            assert recorder.cache[slot + step] == (at + step, token)
            hidden += token + 1
            token = int(hidden) % VOCAB
            expected.append(token)
        references = References(drafter.tokens.num_latest, k, 5)
        names = references.draft(np.full(k, row), np.arange(k))
        assert drafter.tokens.fill_in(ints(names, cpu)).tolist() == expected
    # Up to the last accepted position, the cache contains entries of sampled tokens, not of drafts.
    assert recorder.cache[110] == (10, sampled_row[0])
    assert recorder.cache[200] == (0, 5)


def test_one_gather_leaves_known_tokens_alone_and_fills_in_the_latest() -> None:
    cpu = torch.device("cpu")
    tokens = TokenTable(VOCAB, 4, cpu)
    tokens.latest[:] = ints([7, 9, 11, 13], cpu)
    latest = References(4, 0, 5).sample(np.asarray([3, 0]))

    assert tokens.fill_in(ints([0, *latest, VOCAB - 1, 3], cpu)).tolist() == [0, 13, 7, 49, 3]


def test_no_token_id_is_a_reference() -> None:
    cpu = torch.device("cpu")
    tokens = TokenTable(VOCAB, 4, cpu)

    for beyond in range(VOCAB, VOCAB + 64):
        with pytest.raises(IndexError):
            tokens.fill_in(ints([1, beyond], cpu))
