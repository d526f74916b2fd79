"""Linear attention with the gated delta rule is compared with the layers of transformers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from dist_aclgraph.comm.groups import ALONE, RankGroups
from dist_aclgraph.device.npu import GraphPool, Npu
from dist_aclgraph.engine.model_runner import TORCH_DTYPES
from dist_aclgraph.graphs.recording import Recording
from dist_aclgraph.kv.cache_spec import DTYPE_BYTES
from dist_aclgraph.layers.state_metadata import DirectLayout, DirectStates, StateMetadata
from dist_aclgraph.models.attention_kind import CacheRoom
from tests.engine.state_rows import (
    FAMILIES,
    HIDDEN,
    WIDTH,
    Direct,
    Prompt,
    StateLayer,
    Unsummed,
    kind_of,
    make_oracle,
    make_spec,
    save_layer,
)
from tests.slow import spread

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# The results have a size of about 0.3. In bfloat16, layers use CANN's fused operators. In float32,
# they compute the delta rule with plain operators.
TOLERANCE = {FLOAT32: {"rtol": 1e-4, "atol": 1e-5}, BFLOAT16: {"rtol": 3e-2, "atol": 1e-2}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(npu: Any, request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(family: str) -> Any:
    return make_oracle(family)


@pytest.fixture(scope="module")
def directory(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_layer(oracle, tmp_path_factory.mktemp("layer"))


@pytest.fixture(params=[FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def layer(npu: Npu, directory: Path, family: str, request: pytest.FixtureRequest) -> StateLayer:
    return StateLayer(npu, directory, family, request.param)


def hidden(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


_known: WeakKeyDictionary[Any, dict[bytes, Tensor]] = WeakKeyDictionary()


def expected(oracle: Any, rows: Tensor) -> Tensor:
    """Return the expected results for all tokens of a request, computed in one call. They are
    cached for all tests.
    """
    known, key = _known.setdefault(oracle, {}), rows.numpy().tobytes()
    if key not in known:
        with torch.no_grad():
            known[key] = oracle(rows[None])[0]
    return known[key]


def assert_close(layer: StateLayer, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, **TOLERANCE[layer.dtype])


def run_prompt(layer: StateLayer, rows: Tensor, cuts: list[int], slot: int) -> Tensor:
    """Run a prompt in chunks. They end at the positions ``cuts`` and at the prompt's end."""
    parts = torch.tensor_split(rows, cuts)
    outs = [
        layer.run(prompts=[Prompt(part, slot, slot if i else None)])[0]
        for i, part in enumerate(parts)
    ]
    return torch.cat(outs)


@pytest.mark.parametrize("length", [1, 3, 4, 63, 64, 65])
def test_a_prompt_and_the_tokens_after_it(layer: StateLayer, oracle: Any, length: int) -> None:
    rows = hidden(length + 3)

    found = [run_prompt(layer, rows[:length], [], slot=5)]
    found += [layer.run([Direct(rows[i : i + 1], [5])])[0] for i in range(length, length + 3)]

    assert_close(layer, torch.cat(found), expected(oracle, rows))


@pytest.mark.parametrize("cuts", [[40], [1, 2, 3, 67, 68, 90]])
def test_a_prompt_in_several_parts(layer: StateLayer, oracle: Any, cuts: list[int]) -> None:
    rows = hidden(100)

    found = run_prompt(layer, rows, cuts, slot=5)

    assert_close(layer, found, expected(oracle, rows))


def test_token_by_token_from_a_prompt_of_one_token(layer: StateLayer, oracle: Any) -> None:
    rows = hidden(9)

    found = [run_prompt(layer, rows[:1], [], slot=2)]
    found += [layer.run([Direct(rows[i : i + 1], [2])])[0] for i in range(1, 9)]

    assert_close(layer, torch.cat(found), expected(oracle, rows))


def test_a_mixed_step(layer: StateLayer, oracle: Any) -> None:
    a, b, c, d = (hidden(20, seed) for seed in range(4))
    run_prompt(layer, a[:8], [], slot=3)
    run_prompt(layer, b[:10], [], slot=7)
    run_prompt(layer, c[:6], [], slot=1)

    found = layer.run(
        [Direct(a[8:9], [3]), Direct(b[10:13], [7, 8, 9])],
        [Prompt(c[6:], 1, source=1), Prompt(d, 4)],
        padding=5,
    )

    for out, rows, part in zip(
        found, (a, b, c, d), (slice(8, 9), slice(10, 13), slice(6, 20), slice(20)), strict=True
    ):
        assert_close(layer, out, expected(oracle, rows)[part])


def test_a_part_of_a_prompt_may_read_one_slot_and_write_another(
    layer: StateLayer, oracle: Any
) -> None:
    rows = hidden(12)
    run_prompt(layer, rows[:5], [], slot=3)

    layer.run(prompts=[Prompt(rows[5:], 6, source=3)])
    (again,) = layer.run(prompts=[Prompt(rows[5:], 8, source=3)])

    assert_close(layer, again, expected(oracle, rows)[5:])


# PAIRS_ACCEPTED has nine triples. For any two positions, the triples contain all nine pairs of
# values.
ALL_ACCEPTED = list(product([1, 2, 3], repeat=3))
PAIRS_ACCEPTED = [(a, b, c) for a, b, c in ALL_ACCEPTED if (a + b + c) % 3 == 0]


@pytest.mark.parametrize("accepted", spread(ALL_ACCEPTED, PAIRS_ACCEPTED, ALL_ACCEPTED))
def test_rejected_drafts_change_nothing(
    layer: StateLayer, oracle: Any, accepted: tuple[int, ...]
) -> None:
    """A request has two drafts in each step; after step i, ``accepted[i]`` of the step's tokens are
    kept.
    """
    rows, window = hidden(5 + sum(accepted) + 1), [4, 5, 6]
    run_prompt(layer, rows[:5], [], slot=4)
    neighbour = hidden(30, seed=8)
    run_prompt(layer, neighbour[:9], [], slot=9)

    done, kept, found, beside = 5, 1, [], []
    for number, count in enumerate(accepted):
        right = rows[done : done + count]
        tokens = torch.cat([right, hidden(3 - count, seed=50 + number)])
        at = 9 + number
        outs = layer.run([Direct(tokens, window, kept), Direct(neighbour[at : at + 1], [9])])
        found.append(outs[0][:count])
        beside.append(outs[1])
        done, kept = done + count, count
    # A request without drafts has only one slot, which contains its current state.
    found += layer.run([Direct(rows[done : done + 1], [window[kept - 1]])])

    assert_close(layer, torch.cat(found), expected(oracle, rows)[5:])
    assert_close(layer, torch.cat(beside), expected(oracle, neighbour)[9:12])


def test_a_prompt_may_end_in_a_window_of_drafts(layer: StateLayer, oracle: Any) -> None:
    rows = hidden(11)
    run_prompt(layer, rows[:4], [], slot=4)
    layer.run([Direct(torch.cat([rows[4:6], hidden(1, 9)]), [4, 5, 6])])

    # Two tokens were accepted, so the current state is in slot 5.
    (found,) = layer.run(prompts=[Prompt(rows[6:], 5, source=5)])

    assert_close(layer, found, expected(oracle, rows)[6:])


@pytest.mark.parametrize("family", FAMILIES[1:])
@pytest.mark.parametrize("a_log", [4.0, -8.0], ids=["forgets", "keeps"])
def test_extreme_decays(npu: Npu, tmp_path: Path, a_log: float, family: str) -> None:
    oracle, rows = make_oracle(family, a_log), hidden(80)
    for dtype in (FLOAT32, BFLOAT16):
        layer = StateLayer(npu, save_layer(oracle, tmp_path), family, dtype)

        found = run_prompt(layer, rows[:70], [33], slot=1)
        found = torch.cat([found, *layer.run([Direct(rows[70:78], range(1, 9))])])

        assert found.isfinite().all()
        assert_close(layer, found, expected(oracle, rows)[:78])


def test_two_ranks_add_up_to_one(npu: Npu, directory: Path, family: str, oracle: Any) -> None:
    rows = hidden(70)
    ranks = [StateLayer(npu, directory, family, group=Unsummed((0, 1), rank)) for rank in range(2)]

    parts = [
        torch.cat([run_prompt(rank, rows[:66], [], 3), *rank.run([Direct(rows[66:], range(3, 7))])])
        for rank in ranks
    ]

    torch.testing.assert_close(parts[0] + parts[1], expected(oracle, rows), rtol=1e-4, atol=1e-5)
    assert ranks[0].cache.recurrent.shape[1] == 2


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_the_bytes_of_a_slot_are_computed_from_the_shape(npu: Npu, name: str, family: str) -> None:
    spec = make_spec(family)
    for tp in (1, 2):
        groups, dtype = RankGroups(Unsummed(tuple(range(tp)), 0), ALONE), TORCH_DTYPES[name]

        kind = kind_of(family, groups, device=npu.device, dtype=dtype)
        states = kind.make_cache(CacheRoom(0, 0, dtype, num_slots=5)).states

        assert spec.linear is not None
        wanted = 5 * spec.linear.state_bytes(tp, name, DTYPE_BYTES[name])
        assert sum(tensor.nbytes for tensor in states) == wanted


def test_a_graph_equals_eager_steps_and_leaves_other_slots_unchanged(layer: StateLayer) -> None:
    """The graph has four requests of three tokens. The replayed steps have fewer requests than the
    graph, in any slots.
    """
    with torch.inference_mode():
        layer.cache.conv[0], layer.cache.recurrent[0] = torch.nan, torch.nan
        run_prompt(layer, hidden(5), [], slot=4)
        run_prompt(layer, hidden(7, 1), [], slot=7)
        eager = StateLayer(layer.npu, layer.directory, layer.family, layer.dtype)
        for mine, other in zip(eager.cache.states, layer.cache.states, strict=True):
            mine.copy_(other)
        replay = capture_step(layer, num_reqs=4, num_tokens=3)
    others = [*range(1, 4), *range(10, layer.num_slots)]
    before = [states[others].cpu() for states in layer.cache.states]

    for number, (kept, bases) in enumerate([((1, 1), (4, 7)), ((3, 2), (4, 7)), ((2,), (7,))]):
        live = [
            Direct(hidden(3, 20 + number + i), range(base, base + 3), each)
            for i, (base, each) in enumerate(zip(bases, kept, strict=True))
        ]
        padding = [Direct(torch.ones(3, HIDDEN), [0, 0, 0])] * (4 - len(live))
        found = replay(live + padding)

        wanted = torch.cat(eager.run(live + padding))
        count = 3 * len(live)
        assert torch.equal(found[:count], wanted[:count])
        assert found[:count].isfinite().all()
    after = [states[others].cpu() for states in layer.cache.states]
    assert all(map(torch.equal, before, after))
    mine, other = layer.cache.recurrent[4:10].cpu(), eager.cache.recurrent[4:10].cpu()
    assert torch.equal(mine, other)


def capture_step(layer: StateLayer, num_reqs: int, num_tokens: int) -> Any:
    """Capture a step of direct requests with ``num_tokens`` tokens each; return a function that
    replays this step.

    The graph contains the whole layer, from its hidden states to its results.
    """
    device = layer.npu.device
    layout = DirectLayout.of_graph(num_reqs, num_tokens, WIDTH, device)
    bases, accepted = layer.send([0] * num_reqs), layer.send([1] * num_reqs)
    h = torch.zeros(num_reqs * num_tokens, HIDDEN, dtype=layer.dtype, device=device)
    out = torch.zeros_like(h)

    def step() -> None:
        direct = DirectStates.of_windows(bases, accepted, layout)
        out.copy_(layer.forward(h, StateMetadata(direct=direct)))

    step()  # torch_npu prepares operators at their first call
    graph = Recording(layer.npu, GraphPool()).record("the step", step)

    @torch.inference_mode()
    def replay(requests: list[Direct]) -> Tensor:
        assert [len(each.rows) for each in requests] == layout.lengths.tolist()
        h.copy_(torch.cat([each.rows for each in requests]).to(layer.dtype))
        bases.copy_(layer.send([each.slots[0] for each in requests]))
        accepted.copy_(layer.send([each.accepted for each in requests]))
        torch.npu.synchronize()
        graph.replay()
        torch.npu.synchronize()
        return out.float().cpu()

    return replay
