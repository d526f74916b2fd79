"""Law: if several ranks share the contexts of requests, in whatever way, steps with graphs and
eager steps give the same tokens as a single rank.

The deployments are drawn at random, from seeds. All examples of one deployment use the same
processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.engine.model_runner import ModelRunner
from dist_aclgraph.sampling import SamplingParams
from tests import laws
from tests.checkpoints import make_prompts, make_reference
from tests.deployments import make_deployment_config
from tests.engine.runners import MAX_LEN, make_runner
from tests.engine.steps.test_modes_law import EAGER, MAX_SEQS, MAX_TOKENS, Arrival, run
from tests.lockstep import Lockstep, lockstep
from tests.slow import slow
from tests.unit.scheduler.requests import submit

DEMO = Path(__file__).parents[3] / "models" / "tiny-deepseek"
NUM_BLOCKS = 64
NUM_SEEDS = 20 if laws.is_full() else 2
STEM = make_prompts([80], seed=9)[0]  # the first tokens of many prompts


@dataclass(frozen=True)
class Setting:
    """The sizes of a deployment, drawn at random.

    Attributes:
        ranks: the sizes of its tp, pcp and dcp groups.
        drafts: number of draft tokens; None for the model with grouped-query attention, which has
            no drafts.
    """

    ranks: tuple[int, int, int]
    block_size: int
    interleave: int
    drafts: int | None
    mode: str

    @classmethod
    def drawn(cls, seed: int) -> Setting:
        """Draw a setting from a seed. 20 consecutive seeds give all combinations of ``ranks`` and
        ``drafts``.
        """
        layouts, drafts = [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 2, 1)], [3, None, 1, 2, 0]
        rng = random.Random(seed)
        block_size = rng.choice([16, 32])
        return cls(
            layouts[seed % 4],
            block_size,
            rng.choice([1, 2, 4, 16, block_size]),
            drafts[seed % 5],
            rng.choice(["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"]),
        )

    @property
    def shards(self) -> int:
        return self.ranks[2]

    def __str__(self) -> str:
        parts = (*self.ranks, self.block_size, self.interleave, self.drafts, self.mode)
        return "-".join(map(str, parts))


@pytest.fixture(scope="module")
def one_key_head(npu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    make_reference("Qwen3ForCausalLM", directory, num_hidden_layers=2, num_key_value_heads=1)
    return directory


@pytest.fixture(scope="module")
def alone(npu: Any, one_key_head: Path) -> dict[Path, ModelRunner]:
    """Return, for each model, a runner on one rank that uses no drafts."""
    return {path: make_runner(npu, path, MAX_SEQS) for path in (DEMO, one_key_head)}


@dataclass
class Deployment:
    setting: Setting
    group: Lockstep
    alone: ModelRunner

    def play(
        self, arrivals: list[Arrival], num_blocks: int | None, *, is_eager: bool
    ) -> dict[str, list[int]]:
        """Run the requests of ``arrivals`` on all ranks; return each request's tokens."""
        self.group.restart(num_blocks=num_blocks, is_eager=is_eager)
        scheduler = self.group.scheduler
        tokens: dict[str, list[int]] = {}
        step, last = 0, max(a.at_step for a in arrivals)
        while step <= last or scheduler.has_work:
            for index, arrival in enumerate(arrivals):
                if arrival.at_step == step:
                    params = SamplingParams(
                        max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True
                    )
                    scheduler.add(submit(str(index), arrival.prompt, params))
                    tokens[str(index)] = []
                if arrival.abort_at == step:
                    scheduler.abort(str(index))
            plan = scheduler.schedule()
            if plan is not None:
                done = self.group.ranks.step(plan)
                assert len({rank.num_collectives for rank in done}) == 1
                for output in scheduler.update([rank.result for rank in done]):
                    tokens[output.request_id] += output.tokens
            step += 1
            assert step < 2000
        assert all(rank.pool.num_used == 0 for rank in scheduler.ranks)
        return tokens

    def check(self, arrivals: list[Arrival], num_blocks: int | None = None) -> None:
        """Check that one rank, eager steps and steps with graphs give the same tokens."""
        wanted, _ = run(self.alone, EAGER, arrivals, 60)
        eager = self.play(arrivals, num_blocks, is_eager=True)
        replayed = self.play(arrivals, num_blocks, is_eager=False)
        assert replayed == eager
        for index, arrival in enumerate(arrivals):
            tokens, all_of_them = eager[str(index)], wanted[str(index)]
            if arrival.abort_at is not None:  # an aborted request can have any number of tokens
                length = min(len(tokens), len(all_of_them))
                tokens, all_of_them = tokens[:length], all_of_them[:length]
            assert tokens == all_of_them


SETTINGS = [Setting.drawn(seed) for seed in range(NUM_SEEDS)]


@pytest.fixture(scope="module", params=[slow(SETTINGS[0]), *SETTINGS[1:]], ids=str)
def deployment(
    request: pytest.FixtureRequest, alone: dict[Path, ModelRunner], one_key_head: Path
) -> Iterator[Deployment]:
    setting: Setting = request.param
    tp, pcp, dcp = setting.ranks
    directory = one_key_head if setting.drafts is None else DEMO
    drafts = setting.drafts or 0
    decode = {"sizes": tuple(count * (drafts + 1) for count in (1, 2, MAX_SEQS))}
    mixed = (16, MAX_TOKENS)
    sizes = {
        "FULL_DECODE_ONLY": decode,
        "FULL_AND_PIECEWISE": {**decode, "mixed_sizes": mixed},
        "PIECEWISE": {"sizes": (4, *mixed)},
    }[setting.mode]
    config = make_deployment_config(
        directory,
        max_model_len=MAX_LEN,
        parallel={"tp": tp, "pcp": pcp, "dcp": dcp, "cp_interleave": setting.interleave},
        graph={"mode": setting.mode, "lazy": "off", **sizes},
        scheduler={"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_TOKENS},
        speculative={"num_tokens": drafts},
        kv={"block_size": setting.block_size, "num_blocks": NUM_BLOCKS},
    )
    with lockstep(config) as group:
        yield Deployment(setting, group, alone[directory])


@st.composite
def arrivals_of(draw: st.DrawFn, setting: Setting) -> list[Arrival]:
    """Draw requests whose prompts share a beginning. Many of their lengths are near multiples of
    the interleave size.
    """
    turns = st.builds(
        lambda count, more: max(1, min(100, count * setting.interleave + more)),
        st.integers(1, 3 * setting.shards),
        st.integers(-1, 1),
    )
    length = st.one_of(turns, st.integers(1, 100))
    prompt = st.builds(
        lambda stem, length, other: (*STEM[: min(stem, length)], *other[: max(0, length - stem)]),
        st.sampled_from([0, 40, 80]),
        length,
        st.integers(0, 9).map(lambda seed: make_prompts([100], seed)[0]),
    )
    arrival = st.builds(
        Arrival,
        at_step=st.integers(0, 12),
        prompt=prompt,
        max_tokens=st.integers(1, 25),
        abort_at=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    )
    return draw(st.lists(arrival, min_size=1, max_size=8))


@laws.examples(16)
@given(st.data())
def test_graphs_and_eager_steps_give_the_tokens_of_one_rank(
    deployment: Deployment, data: st.DataObject
) -> None:
    setting = deployment.setting
    arrivals = data.draw(arrivals_of(setting))
    # The cache has only a few blocks more than the longest request needs, so some requests are
    # preempted.
    smallest = 2 + -(-(MAX_LEN + 4) // (setting.block_size * setting.shards))
    deployment.check(arrivals, data.draw(st.integers(smallest, smallest + 8)))


def test_a_small_cache_preempts_and_still_gives_the_same_tokens(deployment: Deployment) -> None:
    setting = deployment.setting
    arrivals = [Arrival(i, tuple(range(70 * i, 70 * i + 58)), 25, None) for i in range(6)]
    smallest = 2 + -(-(MAX_LEN + 4) // (setting.block_size * setting.shards))

    deployment.check(arrivals, smallest)

    assert deployment.group.scheduler.num_preemptions > 0


@pytest.mark.parametrize("near", [slow(-1), slow(0), 1])
def test_replays_cross_the_turns_of_shards_far_beyond_captured_lengths(
    deployment: Deployment, near: int
) -> None:
    setting = deployment.setting
    firsts = [n * setting.interleave + near for n in range(1, 1 + MAX_SEQS)]
    lengths = [min(MAX_LEN - 48, max(1, first)) for first in firsts]
    arrivals = [
        Arrival(0, tuple(prompt), 48, None) for prompt in make_prompts(lengths, seed=near + 3)
    ]

    deployment.check(arrivals)

    assert deployment.group.scheduler.dispatcher.replays
