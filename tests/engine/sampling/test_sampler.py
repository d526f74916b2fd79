"""The sampler on the emulated NPU is compared with a simple, slow sampler."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.engine.sampling.race_noise import RaceNoise
from dist_aclgraph.engine.sampling.sampler import LOGPROBS_WIDTH, choose_tokens, queue_logprobs
from dist_aclgraph.engine.sampling.sampling_places import send_places
from dist_aclgraph.engine.sampling.sampling_table import SamplingTable
from dist_aclgraph.engine.sampling.token_counts import TokenCounts
from dist_aclgraph.steps.step import RowSampling

VOCAB = 24


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Place:
    """A position at which a token is sampled: after the request and ``num_drafts`` drafts."""

    sampling: RowSampling
    token_ids: np.ndarray
    num_drafts: int = 0


def make_row(length: int = 5, tokens: list[int] | None = None, **sampling: Any) -> Place:
    ids = tokens if tokens is not None else [0] * length
    return Place(RowSampling(**sampling), np.asarray(ids, np.int32))


def run(npu: Any, logits: torch.Tensor, rows: list[Place]) -> tuple[list[int], list[Any]]:
    def to_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(npu.device)

    table = SamplingTable(len(rows))
    counts = TokenCounts(len(rows), VOCAB, npu.device, to_device)
    for index, row in enumerate(rows):
        table.set(index, row.sampling)
        if row.sampling.has_penalties:
            counts.begin(index, row.token_ids, row.sampling.num_prompt_tokens)
    positions = [len(row.token_ids) + row.num_drafts for row in rows]
    places = send_places(table, np.arange(len(rows), dtype=np.int32), VOCAB, to_device)
    on_device = logits.to(npu.device)
    noise = RaceNoise(logits.shape[1], to_device)
    at = np.asarray(positions, np.int32)
    chosen = torch.empty(len(rows), dtype=torch.int32, device=npu.device)
    choose_tokens(on_device, places, at, counts, noise, to_device, chosen)
    reports: dict[int, Any] = {}
    if places.logprobs is not None:
        landing = npu.pinned((len(rows) * LOGPROBS_WIDTH,), torch.float32)
        coming = queue_logprobs(on_device, chosen, places.logprobs, landing)
        npu.synchronize()
        reports = dict(coming.read())
    return chosen.cpu().tolist(), [reports.get(index) for index in range(len(rows))]


def target(logits: torch.Tensor, s: RowSampling) -> np.ndarray:
    """Return the distribution that the parameters ``s`` require, computed token by token."""
    p = (logits.double() / s.temperature).softmax(-1).numpy()
    order = sorted(range(VOCAB), key=lambda token: -p[token])
    if s.top_k:
        order = order[: s.top_k]
    total = sum(p[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < s.top_p and p[token] >= s.min_p * p[order[0]]:
            kept.append(token)
        mass += p[token] / total
    out = np.zeros(VOCAB)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
    ],
)
def test_tokens_follow_the_target_distribution(npu: Any, sampling: dict[str, Any]) -> None:
    count, logits = 4000, make_logits(1)
    rows = [make_row(1 + i, seed=7, **sampling) for i in range(count)]

    ids, _ = run(npu, logits.expand(count, -1), rows)

    wanted = target(logits[0], rows[0].sampling)
    seen = np.bincount(ids, minlength=VOCAB)
    assert seen[wanted == 0].sum() == 0
    likely = wanted * count >= 5
    chi_square = ((seen - wanted * count)[likely] ** 2 / (wanted * count)[likely]).sum()
    assert chi_square < 2 * likely.sum() + 20  # the bound is at least the 99.9 % quantile


def test_a_row_gets_the_same_token_in_any_batch(npu: Any) -> None:
    logits = make_logits(6)
    rows = [make_row(3 + i, seed=100 + i, temperature=1.0, top_p=0.9) for i in range(6)]
    together, _ = run(npu, logits, rows)

    alone = [run(npu, logits[i : i + 1], [rows[i]])[0][0] for i in range(6)]
    backwards, _ = run(npu, logits.flip(0), rows[::-1])

    assert alone == together
    assert backwards[::-1] == together


def test_seed_and_position_change_the_token(npu: Any) -> None:
    logits = make_logits(1).expand(64, -1)

    by_seed, _ = run(npu, logits, [make_row(5, seed=i, temperature=1.0) for i in range(64)])
    by_place, _ = run(npu, logits, [make_row(5 + i, seed=3, temperature=1.0) for i in range(64)])

    assert len(set(by_seed)) > 3
    assert len(set(by_place)) > 3
    assert by_seed != by_place


def test_greedy_rows_beside_random_ones_keep_the_most_probable_token(npu: Any) -> None:
    logits = make_logits(8)
    rows = [make_row(temperature=float(i % 2), seed=i) for i in range(8)]

    ids, _ = run(npu, logits, rows)

    assert ids[::2] == logits.argmax(-1).tolist()[::2]


def test_penalties_count_prompt_and_output_as_the_api_defines_them(npu: Any) -> None:
    logits = make_logits(1, seed=3)
    tokens = [1, 2, 2, 3, 4, 4, 4]  # four prompt tokens, three output tokens
    row = make_row(
        tokens=tokens,
        num_prompt_tokens=4,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.6,
        temperature=1.0,
        seed=1,
    )
    wanted = logits[0].clone()
    for token in {1, 2, 3, 4}:
        value = wanted[token]
        wanted[token] = value / 1.3 if value > 0 else value * 1.3
    wanted[4] -= 3 * 0.4 + 0.6
    count = 3000

    def moved(i: int) -> Place:
        return Place(RowSampling(**{**_fields(row.sampling), "seed": i}), row.token_ids)

    ids, _ = run(npu, logits.expand(count, -1), [moved(i) for i in range(count)])

    p = wanted.double().softmax(-1).numpy() * count
    seen = np.bincount(ids, minlength=VOCAB)
    likely = p >= 5
    assert ((seen - p)[likely] ** 2 / p[likely]).sum() < 2 * likely.sum() + 20


@pytest.mark.parametrize("rows", [(1, 2), (2, 0), (0,)])
@pytest.mark.parametrize("repetition", [(1.3, 1.1, 1.7), (1.3, 0.6, 1.0)])
def test_penalised_logits_follow_the_formulas(
    npu: Any, rows: tuple[int, ...], repetition: tuple[float, ...]
) -> None:
    def to_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(npu.device)

    tokens, num_prompt = np.array([1, 2, 2, 3, 4, 4, 4, 2], np.int32), 4
    table, counts = SamplingTable(3), TokenCounts(3, VOCAB, npu.device, to_device)
    for row, factor in enumerate(repetition):
        penalties = {"frequency_penalty": 0.3 * row, "presence_penalty": 0.5 - row}
        table.set(row, RowSampling(4, repetition_penalty=factor, **penalties))
        counts.begin(row, tokens + row, num_prompt)
    logits = make_logits(len(rows), seed=5)
    places = send_places(table, np.array(rows, np.int32), VOCAB, to_device)
    assert places.penalties is not None

    found = counts.penalise(logits.to(npu.device), places.penalties).cpu()

    wanted = logits.clone()
    for values, row in zip(wanted, rows, strict=True):
        seen = torch.unique(torch.from_numpy(tokens + row)).long()
        ours, factor = values[seen], repetition[row]
        values[seen] = torch.where(ours > 0, ours / factor, ours * factor)
        for token in (tokens + row)[num_prompt:]:
            values[token] -= 0.3 * row
        values[np.unique((tokens + row)[num_prompt:])] -= 0.5 - row
    torch.testing.assert_close(found, wanted)


def _fields(sampling: RowSampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def test_a_repetition_penalty_changes_the_greedy_token(npu: Any) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.0, 1.5

    ids, _ = run(npu, logits, [make_row(tokens=[5], num_prompt_tokens=1, repetition_penalty=2.0)])

    assert ids == [6]


@pytest.mark.parametrize("others", [0, 2], ids=["all rows", "some rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_to_the_logits_of_its_row(
    npu: Any, dtype: torch.dtype, others: int
) -> None:
    logits = make_logits(3 + others).to(dtype)
    biases = np.array([50, -50, 49.5], np.float32)
    biased = {"biased": pack_ints([3, 4, 5]), "biases": biases.tobytes()}
    rows = [make_row(**biased), make_row(allowed=pack_ints([6, 7])), make_row(**biased)]
    expected = logits.float().clone()
    expected[[0, 2], 3:6] += torch.from_numpy(biases)
    expected[1, [i for i in range(VOCAB) if i not in (6, 7)]] = -torch.inf

    ids, _ = run(npu, logits, rows + [make_row()] * others)

    assert ids == expected.argmax(-1).tolist()


class Operators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_step_in_which_all_rows_have_biases_needs_two_operators(npu: Any) -> None:
    def to_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(npu.device)

    table, rows = SamplingTable(2), np.arange(2, dtype=np.int32)
    for row in range(2):
        biases = np.array([1], np.float32).tobytes()
        table.set(row, RowSampling(biased=pack_ints([row]), biases=biases))
    places = send_places(table, rows, VOCAB, to_device)
    counts, noise = (TokenCounts(2, VOCAB, npu.device, to_device), RaceNoise(VOCAB, to_device))
    logits = make_logits(2).bfloat16().to(npu.device)
    chosen = torch.empty(2, dtype=torch.int32, device=npu.device)

    with torch.inference_mode(), Operators() as called:
        choose_tokens(logits, places, rows, counts, noise, to_device, chosen)

    assert called.names == ["aten.add.Tensor", "aten.argmax.out"]


def test_end_tokens_wait_for_min_tokens(npu: Any) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, 1.0
    early = make_row(6, num_prompt_tokens=4, min_tokens=3, suppressed=(5,))
    late = make_row(7, num_prompt_tokens=4, min_tokens=3, suppressed=(5,))

    ids, _ = run(npu, logits, [early, late])

    assert ids == [6, 5]


def test_min_tokens_may_be_as_many_as_an_integer_holds(npu: Any) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, 1.0
    row = make_row(6, num_prompt_tokens=4, min_tokens=2**31 - 1, suppressed=(5,))

    ids, _ = run(npu, logits, [row])

    assert ids == [6]


def test_logprobs_are_those_of_the_raw_distribution(npu: Any) -> None:
    logits = make_logits(2, seed=9)
    rows = [
        make_row(logprobs=3, temperature=0.3, seed=1),
        make_row(logprobs=-1),
    ]

    ids, [report, none] = run(npu, logits, rows)

    expected = logits[0].log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    assert none is None
    assert unpack_ints(report.token_ids).tolist() == [ids[0], *order[:3]]
    assert report.logprobs == pytest.approx(
        [expected[token].item() for token in [ids[0], *order[:3]]], abs=1e-4
    )
    assert report.rank == order.index(ids[0]) + 1


def test_zero_logprobs_report_the_chosen_token_alone(npu: Any) -> None:
    ids, [report] = run(npu, make_logits(1), [make_row(logprobs=0)])

    assert unpack_ints(report.token_ids).tolist() == ids
    assert len(report.logprobs) == 1


def test_logits_are_not_modified(npu: Any) -> None:
    logits = make_logits(1).to(npu.device)
    before = logits.cpu().clone()

    run(npu, logits, [make_row(tokens=[1, 2], num_prompt_tokens=1, presence_penalty=1.0,
                               min_tokens=9, suppressed=(3,))])  # fmt: skip

    assert torch.equal(logits.cpu(), before)


def test_a_place_behind_drafts_is_sampled_as_if_they_were_tokens(npu: Any) -> None:
    logits = make_logits(8)
    sampling = {"temperature": 1.0, "seed": 5}
    known = [make_row(4 + i, **sampling) for i in range(8)]
    drafted = [replace(make_row(4, **sampling), num_drafts=i) for i in range(8)]

    assert run(npu, logits, known)[0] == run(npu, logits, drafted)[0]


def test_counted_step_by_step_penalties_are_those_of_the_whole_history(npu: Any) -> None:
    def to_device(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(npu.device)

    chance = np.random.default_rng(4)
    sampling = RowSampling(
        num_prompt_tokens=6, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.4
    )
    table, logits = SamplingTable(3), make_logits(3).to(npu.device)
    for row in range(3):
        table.set(row, sampling)
    history = chance.integers(0, VOCAB, (3, 30)).astype(np.int32)
    steps = TokenCounts(3, VOCAB, npu.device, to_device)
    rows = np.arange(3, dtype=np.int32)
    for row in range(3):
        steps.begin(row, chance.integers(0, VOCAB, 9).astype(np.int32), 2)  # a previous request
        steps.begin(row, history[row, :8], 6)
    for column in range(8, 30):
        steps.add(rows, to_device(history[:, column]))
    whole = TokenCounts(3, VOCAB, npu.device, to_device)
    for row in range(3):
        whole.begin(row, history[row], 6)

    penalties = send_places(table, rows, VOCAB, to_device).penalties
    assert penalties is not None

    found = steps.penalise(logits, penalties).cpu()
    assert torch.equal(found, whole.penalise(logits, penalties).cpu())
    assert not torch.equal(found, logits.cpu())


def test_the_rows_of_counted_tokens_are_sent_when_they_change(npu: Any) -> None:
    sent: list[Any] = []

    def to_device(array: Any) -> torch.Tensor:
        sent.append(array)
        return torch.from_numpy(array).to(npu.device)

    def num_sent(rows: list[int]) -> int:
        sent.clear()
        tokens = torch.zeros(len(rows), dtype=torch.int32, device=npu.device)
        counts.add(np.array(rows, np.int32), tokens)
        return len(sent)

    counts = TokenCounts(3, VOCAB, npu.device, to_device)

    assert [num_sent(rows) for rows in ([0, 2], [0, 2], [2, 0], [2, 0], [2])] == [1, 0, 1, 0, 1]
    counts.forget()
    assert num_sent([2]) == 1


SKIPPED = """
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import open_npu
emulator = {"strict": False, "kernels": "skip"}
config = make_config({"model": "-", "device": {"kind": "emulated", "emulator": emulator}})
npu = open_npu(config.device, 0)
from tests.engine.sampling.test_sampler import make_logits, make_row, run
kinds = [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1},
         {"presence_penalty": 0.5}, {"logprobs": 2}]
rows = [make_row(seed=i, temperature=1.0, **kind) for i, kind in enumerate(kinds)]
ids, _ = run(npu, make_logits(len(rows)), rows)
print("sampled", ids)
"""


@pytest.mark.slow
def test_sampling_runs_where_kernels_compute_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-c", SKIPPED], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert f"sampled {[0] * 7}" in done.stdout
